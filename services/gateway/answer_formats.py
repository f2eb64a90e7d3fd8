"""`response_format`, `text.format` and `structured_outputs` to the grammar that they ask for."""

import json
from collections.abc import Mapping
from typing import Any, Final

from finback.services.gateway.grammar import (
    STRUCTURAL_TAG,
    UNSAID,
    Asked,
    one_of,
    schema_asked,
    tag_asked,
)
from finback.services.gateway.known_fields import check_fields
from finback.services.gateway.schema import GenerationRequest, StructuredOutputs
from finback.services.gateway.tool_rules import check_name, invalid_value
from finback.shared.codec.strict_json import loads_strictly
from finback.shared.wire.messages.generate import GrammarSpec

MAX_NAME_CHARS: Final = 64
_TYPES: Final = ("text", "json_object", "json_schema", STRUCTURAL_TAG)
_KINDS: Final = {"json_": "json", "json_object": "json_object", "regex": "regex",
                 "choice": "choice", "grammar": "grammar", STRUCTURAL_TAG: STRUCTURAL_TAG}  # fmt: skip


def asked_of(request: GenerationRequest) -> Asked | None:
    """Of a chat or text completion; None for free text."""
    return one_of(
        from_response_format(request.response_format), from_structured(request.structured_outputs)
    )


def from_response_format(value: Mapping[str, Any] | None) -> Asked | None:
    """OpenAI's chat format, where the schema has a name in an object of its own."""
    field = "response_format"
    kind = _type_of(value, field)
    if value is None or kind == "text":
        return None
    if kind != "json_schema":
        return _plain(value, kind, field)
    check_fields(value, ("type", "json_schema"), field)
    holder, param = value.get("json_schema"), f"{field}.json_schema"
    if not isinstance(holder, Mapping):
        raise invalid_value(param, "an object with name and schema")
    check_fields(holder, ("name", "description", "schema", "strict"), param)
    return _named_schema(holder, field, param)


def from_text_format(value: Mapping[str, Any] | None) -> Asked | None:
    """The Responses API's format, which has all in one object."""
    field = "text.format"
    kind = _type_of(value, field)
    if value is None or kind == "text":
        return None
    if kind != "json_schema":
        return _plain(value, kind, field)
    check_fields(value, ("type", "name", "description", "schema", "strict"), field)
    return _named_schema(value, field, field)


def _type_of(value: Mapping[str, Any] | None, field: str) -> str:
    kind = "text" if value is None else value.get("type")
    if kind not in _TYPES:
        raise invalid_value(f"{field}.type", f"one of {', '.join(map(repr, _TYPES))}")
    if kind == "text" and value is not None:
        check_fields(value, ("type",), field)
    return str(kind)


def _plain(value: Mapping[str, Any], kind: str, field: str) -> Asked:
    if kind == STRUCTURAL_TAG:
        return tag_asked(dict(value), field, field)
    check_fields(value, ("type",), field)
    return Asked(spec=GrammarSpec(kind="json_object"), field=field, param=field)


def _named_schema(holder: Mapping[str, Any], field: str, param: str) -> Asked:
    name, strict = holder.get("name"), holder.get("strict")
    if not isinstance(name, str):
        raise invalid_value(f"{param}.name", "a string")
    check_name(name, f"{param}.name", MAX_NAME_CHARS)
    if not isinstance(strict, bool | None):
        raise invalid_value(f"{param}.strict", "true or false")
    strictness = UNSAID if strict is None else "strict" if strict else "lenient"
    return schema_asked(holder.get("schema"), field, f"{param}.schema", strictness)


def from_structured(value: StructuredOutputs | None) -> Asked | None:
    """Our extension, on every API."""
    if value is None:
        return None
    field = "structured_outputs"
    given = [name for name in _KINDS if getattr(value, name) is not None]
    if len(given) != 1:
        told = " and ".join(_KINDS[name] for name in given) or "none"
        names = ", ".join(_KINDS.values())
        raise invalid_value(field, f"an object with exactly one of {names}; it has {told}")
    found, param = getattr(value, given[0]), f"{field}.{_KINDS[given[0]]}"
    strictness = value.strictness or UNSAID
    if given[0] == "json_":
        schema = _loaded(found, param, "a JSON Schema")
        return schema_asked(schema, field, param, strictness)
    if given[0] == STRUCTURAL_TAG:
        return tag_asked(_loaded(found, param, "a structural tag"), field, param, strictness)
    kind = "lark" if given[0] == "grammar" else given[0]
    text = json.dumps(found) if kind == "choice" else "" if kind == "json_object" else found
    return Asked(spec=GrammarSpec(kind=kind, text=text), field=field, param=param)


def _loaded(found: Any, param: str, wanted: str) -> Any:
    if not isinstance(found, str):
        return found
    try:
        return loads_strictly(found)
    except ValueError as error:
        raise invalid_value(param, f"{wanted}; as a text it must be its JSON") from error
