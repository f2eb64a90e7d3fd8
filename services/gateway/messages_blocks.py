"""Content blocks of Messages requests: each to what it says, or to an error that names it."""

import json
from collections.abc import Mapping
from typing import Any, Final

from finback.services.gateway.chat_turns import PART_JOIN
from finback.services.gateway.tool_rules import invalid_value, missing, unsupported
from finback.shared.codec.dialogue import ToolCall
from finback.shared.errors import InvalidRequest

Block = Mapping[str, Any]

# What each type of block may hold beside its type; all may say what is to be cached.
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "text": frozenset({"text", "citations", "cache_control"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input", "caller", "toolset_name", "cache_control"}),
    "tool_result": frozenset(
        {"tool_use_id", "content", "is_error", "toolset_name", "cache_control"}
    ),
}
_USER: Final = frozenset({"text", "tool_result"})
_ASSISTANT: Final = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
_OTHERS: Final = {
    "image": "images are not supported by this model",
    "document": "documents are not supported by this model",
    "search_result": "search results are not supported by this model",
    "container_upload": "this service runs no code",
}
ERROR_PREFIX: Final = "Error: "


def type_of(block: Block, param: str, role: str) -> str:
    """The block's type, which `role` may write, with no field that it does not have."""
    kind = block.get("type")
    if not isinstance(kind, str):
        raise missing(f"{param}.type") if kind is None else invalid_value(f"{param}.type", "text")
    if kind in _OTHERS or kind not in _FIELDS:
        text = _OTHERS.get(kind, f"blocks of type '{kind[:40]}' are not supported")
        raise unsupported(f"{param}.type", text)
    allowed = _ASSISTANT if role == "assistant" else _USER if role == "user" else {"text"}
    if kind not in allowed:
        raise unsupported(f"{param}.type", f"'{kind}' blocks are not for the role '{role}'")
    for name in block:
        if name != "type" and name not in _FIELDS[kind]:
            where = f"{param}.{name[:64]}"
            raise InvalidRequest(
                f"{where}: Extra inputs are not permitted", param=where, reason="unknown_parameter"
            )
    return kind


def text_in(block: Block, param: str) -> str:
    """A text block's text."""
    text = _string(block, "text", param)
    if not text:
        raise InvalidRequest(
            f"{param}.text: text content blocks must be non-empty", param=f"{param}.text"
        )
    return text


def thought_in(block: Block, param: str) -> str:
    """What was thought. Nothing is signed here, so no signature is asked for or looked at."""
    if not isinstance(block.get("signature", ""), str | None):
        raise invalid_value(f"{param}.signature", "a string")
    return _string(block, "thinking", param)


def call_in(block: Block, param: str) -> ToolCall:
    """A call of an earlier turn."""
    call_id, name = _string(block, "id", param), _string(block, "name", param)
    given = block.get("input")
    if not isinstance(given, dict):
        raise invalid_value(f"{param}.input", "an object")
    if not call_id or not name:
        raise invalid_value(f"{param}.{'name' if call_id else 'id'}", "a non-empty string")
    return ToolCall(call_id=call_id, name=name, arguments=json.dumps(given, ensure_ascii=False))


def result_in(block: Block, param: str) -> tuple[str, str]:
    """(the call it answers, its text); an error says that it is one."""
    call_id = _string(block, "tool_use_id", param)
    content, where = block.get("content"), f"{param}.content"
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = PART_JOIN.join(
            _result_text(item, f"{where}.{at}") for at, item in enumerate(content)
        )
    else:
        raise invalid_value(where, "a string or a list of blocks")
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise invalid_value(f"{param}.is_error", "true or false")
    is_told = text.lower().startswith("error")
    return call_id, ERROR_PREFIX + text if is_error and not is_told else text


def _result_text(item: Any, param: str) -> str:
    if not isinstance(item, dict):
        raise invalid_value(param, "a content block")
    type_of(item, param, "tool result")
    return _string(item, "text", param)


def _string(block: Block, name: str, param: str) -> str:
    value = block.get(name)
    if value is None:
        raise missing(f"{param}.{name}")
    if not isinstance(value, str):
        raise invalid_value(f"{param}.{name}", "a string")
    return value
