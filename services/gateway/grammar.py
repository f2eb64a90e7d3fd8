"""`response_format` and `structured_outputs` to a grammar for the sampler service."""

import json
from typing import Any, Final

from finback.services.gateway.known_fields import check_fields
from finback.services.gateway.schema import GenerationRequest
from finback.services.gateway.tool_rules import check_name
from finback.shared.codec.strict_json import loads_strictly
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

MAX_NAME_CHARS: Final = 64
MAX_GRAMMAR_CHARS: Final = 256 * 1024
_KINDS: Final = {"regex": "regex", "grammar": "lark", "choice": "choice", "json": "json_schema"}


def grammar_of(request: GenerationRequest) -> GrammarSpec | None:
    """The grammar that a request asks for, not yet compiled; None for free text."""
    by_format = _from_response_format(request.response_format)
    by_extension = _from_structured_outputs(request.structured_outputs)
    if by_format is not None and by_extension is not None:
        raise InvalidRequest(
            "give response_format or structured_outputs, not both", param="structured_outputs"
        )
    found = by_format or by_extension
    if found is not None and len(found.text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"a grammar may have {MAX_GRAMMAR_CHARS} characters at most, this one has "
            f"{len(found.text)}",
            param="response_format" if by_format is not None else "structured_outputs",
        )
    return found


def grammar_param(grammar: GrammarSpec, request: GenerationRequest) -> str:
    """The field that a grammar came from, for the sampler's verdict on it."""
    if request.structured_outputs is None:
        return "response_format.json_schema.schema"
    names = {kind: name for name, kind in _KINDS.items()}
    return f"structured_outputs.{names.get(grammar.kind, grammar.kind)}"


def _from_response_format(value: dict[str, Any] | None) -> GrammarSpec | None:
    if value is None:
        return None
    kind = value.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise _invalid("response_format.type", "'text', 'json_object' or 'json_schema'")
    is_schema = kind == "json_schema"
    check_fields(value, ("type", "json_schema") if is_schema else ("type",), "response_format")
    if is_schema:
        return _named_schema(value.get("json_schema"), "response_format.json_schema")
    return None if kind == "text" else GrammarSpec(kind="json_object")


def _named_schema(holder: Any, where: str) -> GrammarSpec:
    if not isinstance(holder, dict):
        raise _invalid(where, "an object with name and schema")
    check_fields(holder, ("name", "description", "schema", "strict"), where)
    name = holder.get("name")
    if not isinstance(name, str):
        raise _invalid(f"{where}.name", "a string")
    check_name(name, f"{where}.name", MAX_NAME_CHARS)
    if not isinstance(holder.get("strict"), bool | None):
        raise _invalid(f"{where}.strict", "true or false")
    return _schema(holder.get("schema"), f"{where}.schema")


def _from_structured_outputs(value: dict[str, Any] | None) -> GrammarSpec | None:
    given = {name: item for name, item in (value or {}).items() if item is not None}
    if not given:
        return None
    if len(given) > 1:
        raise _invalid("structured_outputs", f"one of {', '.join(_KINDS)}")
    name, item = next(iter(given.items()))
    where = f"structured_outputs.{name}"
    if name == "json_object" and item is True:
        return GrammarSpec(kind="json_object")
    if name not in _KINDS:
        raise InvalidRequest(f"Unrecognized request argument supplied: {where}", param=where)
    if name == "json":
        return _schema(json_of(item, where) if isinstance(item, str) else item, where)
    if name == "choice":
        return GrammarSpec(kind="choice", text=json.dumps(_choices(item, where)))
    if not isinstance(item, str) or not item:
        raise _invalid(where, "a non-empty string")
    return GrammarSpec(kind=_KINDS[name], text=item)


def json_of(text: str, where: str) -> Any:
    """A JSON Schema given as text."""
    try:
        return loads_strictly(text)
    except ValueError as error:
        raise _invalid(where, "a JSON Schema") from error


def _schema(schema: Any, where: str) -> GrammarSpec:
    if not isinstance(schema, dict | bool):
        raise _invalid(where, "a JSON Schema")
    return GrammarSpec(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


def _choices(item: Any, where: str) -> list[str]:
    is_list = isinstance(item, list) and item and all(isinstance(text, str) for text in item)
    if not is_list:
        raise _invalid(where, "a non-empty list of strings")
    return list(item)


def _invalid(param: str, wanted: str) -> InvalidRequest:
    message = f"Invalid value for '{param}': it must be {wanted}."
    return InvalidRequest(message, param=param, reason="invalid_value")
