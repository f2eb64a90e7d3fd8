"""Input items: what a client sends, checked and put into the form that the API gives back.

Items that the server itself returned are accepted unchanged, fields that SDKs add included; kinds
that are not served are refused by name.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from finback.services.gateway.known_fields import (
    INPUT_FIELDS,
    ITEM_FIELDS,
    OUTPUT_FIELDS,
    check_fields,
)
from finback.services.gateway.store_limits import Item
from finback.shared.errors import InvalidRequest

MAX_ITEMS: Final = 4_096
MAX_PARTS: Final = 4_096
_ID: Final = re.compile(r"^[A-Za-z0-9_.:-]{1,128}\Z")
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text", "summary_text"})
_MEDIA_PARTS: Final = frozenset({"input_image", "input_file", "input_audio", "computer_screenshot"})
_STATUSES: Final = ("in_progress", "completed", "incomplete")


def new_id(prefix: str) -> str:
    """A fresh id that nobody can guess."""
    return f"{prefix}_{secrets.token_hex(24)}"


def items_of(given: str | Sequence[Any], param: str = "input") -> list[Item]:
    """The items of a request; `item_reference`s are left to be resolved."""
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, param)]
    if len(given) > MAX_ITEMS:
        raise InvalidRequest(
            f"'{param}' has {len(given)} items; at most {MAX_ITEMS} can be sent at once",
            param=param,
            reason="array_above_max_length",
        )
    return [_item(raw, f"{param}.{index}") for index, raw in enumerate(given)]


def is_reference(item: Item) -> bool:
    """Stands for another item."""
    return bool(item["type"] == "item_reference")


def _item(raw: Any, param: str) -> Item:
    if not isinstance(raw, Mapping):
        raise invalid(param, "an object")
    kind = raw.get("type")
    if kind is None:
        kind = "message" if "role" in raw or "content" in raw else "item_reference"
    maker = _MAKERS.get(kind) if isinstance(kind, str) else None
    if maker is None:
        raise InvalidRequest(
            f"Invalid value for '{param}.type': items of type {str(kind)[:60]!r} are not supported "
            f"here; supported are {', '.join(sorted(_MAKERS))}.",
            param=f"{param}.type",
            reason="unsupported_value",
        )
    check_fields(raw, ITEM_FIELDS[kind], param)
    return maker(raw, param)


def _message(raw: Mapping[str, Any], param: str) -> Item:
    role = raw.get("role")
    if role not in _ROLES:
        raise invalid(f"{param}.role", f"one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    made: Item = {
        "id": _id_of(raw, param, "msg"),
        "type": "message",
        "role": role,
        "status": _status_of(raw, param),
        "content": _content(raw.get("content"), kind, f"{param}.content"),
    }
    if raw.get("phase") is not None:
        made["phase"] = _text(raw, "phase", param)
    return made


def _content(given: Any, kind: str, param: str) -> list[Item]:
    parts = [{"type": kind, "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list):
        raise invalid(param, "a string or a list of parts")
    if len(parts) > MAX_PARTS:
        raise invalid(param, f"a list of at most {MAX_PARTS} parts")
    return [_part(part, kind, f"{param}.{index}") for index, part in enumerate(parts)]


def _part(raw: Any, kind: str, param: str) -> Item:
    if not isinstance(raw, Mapping):
        raise invalid(param, "an object")
    given = raw.get("type")
    if not isinstance(given, str):
        raise invalid(f"{param}.type", f"'{kind}'")
    if given in _MEDIA_PARTS:
        raise InvalidRequest(
            f"Invalid value for '{param}.type': '{given}' is not supported: the served model reads "
            "text only.",
            param=f"{param}.type",
            reason="unsupported_value",
        )
    if given == "refusal" and kind == "output_text":
        check_fields(raw, ("type", "refusal"), param)
        return {"type": "refusal", "refusal": _text(raw, "refusal", param)}
    if given not in _TEXT_PARTS:
        raise invalid(f"{param}.type", f"'{kind}'")
    is_output = "output_text" in (given, kind)
    check_fields(raw, OUTPUT_FIELDS if is_output else INPUT_FIELDS, param)
    made: Item = {"type": kind, "text": _text(raw, "text", param)}
    return {**made, "annotations": [], "logprobs": []} if kind == "output_text" else made


def _function_call(raw: Mapping[str, Any], param: str) -> Item:
    return {
        "id": _id_of(raw, param, "fc"),
        "type": "function_call",
        "status": _status_of(raw, param),
        "call_id": _named(raw, "call_id", param),
        "name": _named(raw, "name", param),
        "arguments": _text(raw, "arguments", param),
    }


def _custom_call(raw: Mapping[str, Any], param: str) -> Item:
    return {
        "id": _id_of(raw, param, "ctc"),
        "type": "custom_tool_call",
        "status": _status_of(raw, param),
        "call_id": _named(raw, "call_id", param),
        "name": _named(raw, "name", param),
        "input": _text(raw, "input", param),
    }


def _call_output(kind: str, prefix: str) -> "Maker":
    def make(raw: Mapping[str, Any], param: str) -> Item:
        output = raw.get("output")
        if not isinstance(output, str):
            output = _content(output, "input_text", f"{param}.output")
        return {
            "id": _id_of(raw, param, prefix),
            "type": kind,
            "status": _status_of(raw, param),
            "call_id": _named(raw, "call_id", param),
            "output": output,
        }

    return make


def _reasoning(raw: Mapping[str, Any], param: str) -> Item:
    content = raw.get("content")
    made: Item = {
        "id": _id_of(raw, param, "rs"),
        "type": "reasoning",
        "summary": _texts(raw.get("summary") or [], "summary_text", f"{param}.summary"),
        "content": _texts(content or [], "reasoning_text", f"{param}.content"),
    }
    if raw.get("encrypted_content") is not None:
        made["encrypted_content"] = _text(raw, "encrypted_content", param)
    return {**made, "status": _status_of(raw, param)}


def _texts(parts: Any, kind: str, param: str) -> list[Item]:
    if not isinstance(parts, list) or len(parts) > MAX_PARTS:
        raise invalid(param, f"a list of at most {MAX_PARTS} parts")
    made = []
    for index, part in enumerate(parts):
        where = f"{param}.{index}"
        if not isinstance(part, Mapping) or part.get("type") != kind:
            raise invalid(f"{where}.type", f"'{kind}'")
        check_fields(part, ("type", "text"), where)
        made.append({"type": kind, "text": _text(part, "text", where)})
    return made


def _reference(raw: Mapping[str, Any], param: str) -> Item:
    return {"type": "item_reference", "id": _named(raw, "id", param)}


Maker = Callable[[Mapping[str, Any], str], Item]
_MAKERS: Final[dict[str, Maker]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _call_output("function_call_output", "fco"),
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output("custom_tool_call_output", "ctco"),
    "reasoning": _reasoning,
    "item_reference": _reference,
}


def _id_of(raw: Mapping[str, Any], param: str, prefix: str) -> str:
    given = raw.get("id")
    if given is None or given == "":
        return new_id(prefix)
    if not isinstance(given, str) or not _ID.match(given):
        raise invalid(f"{param}.id", "an id of at most 128 letters, digits, '_', '-', '.' or ':'")
    return given


def _status_of(raw: Mapping[str, Any], param: str) -> str:
    status = raw.get("status")
    if status is None:
        return "completed"
    if status not in _STATUSES:
        raise invalid(f"{param}.status", f"one of {', '.join(_STATUSES)}")
    return str(status)


def _named(raw: Mapping[str, Any], field: str, param: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise invalid(f"{param}.{field}", "a string of 1 to 256 characters")
    return value


def _text(raw: Mapping[str, Any], field: str, param: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str):
        raise invalid(f"{param}.{field}", "a string")
    return value


def invalid(param: str, wanted: str) -> InvalidRequest:
    """A 400 that names the field and what it must be."""
    message = f"Invalid value for '{param}': it must be {wanted}."
    return InvalidRequest(message, param=param, reason="invalid_value")
