"""`tools` and `tool_choice` of a Responses request."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from finback.services.gateway.grammar import MAX_GRAMMAR_CHARS
from finback.services.gateway.known_fields import check_fields
from finback.services.gateway.responses_items import invalid
from finback.shared.codec.dialogue import Tool, ToolChoice
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"^[A-Za-z0-9_-]{1,64}\Z")
_SERVED: Final = ("function", "custom")
_NAMES: Final = frozenset({"type", "name", "description"})
_TOOL_FIELDS: Final = {"function": _NAMES | {"parameters", "strict"}, "custom": _NAMES | {"format"}}


def tools_of(given: Sequence[Any] | None) -> tuple[Tool, ...]:
    """The tools; those that a server would have to run itself are refused by name."""
    if given is None:
        return ()
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"a list of at most {MAX_TOOLS} tools")
    tools = tuple(_tool(raw, f"tools.{index}") for index, raw in enumerate(given))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            raise invalid(f"tools.{index}.name", "unlike the names of the other tools")
        seen.add(tool.name)
    return tools


def _tool(raw: Any, param: str) -> Tool:
    if not isinstance(raw, Mapping):
        raise invalid(param, "an object")
    kind = raw.get("type")
    if kind not in _SERVED:
        raise InvalidRequest(
            f"Invalid value for '{param}.type': {str(kind)[:60]!r} tools are not supported here; "
            "supported are 'function' and 'custom'.",
            param=f"{param}.type",
            reason="unsupported_value",
        )
    check_fields(raw, _TOOL_FIELDS[kind], param)
    name, description = raw.get("name"), raw.get("description")
    if not isinstance(name, str) or not _NAME.match(name):
        raise invalid(f"{param}.name", "1 to 64 letters, digits, '_' or '-'")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{param}.description", "a string")
    if kind == "custom":
        grammar = _custom_format(raw.get("format"), f"{param}.format")
        return Tool(
            name=name,
            description=description or "",
            kind="custom",
            grammar=grammar,
            param=f"{param}.format.definition",
        )
    parameters = raw.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise invalid(f"{param}.parameters", "a JSON Schema object")
    return Tool(
        name=name,
        description=description or "",
        parameters=parameters,
        strict=strict_of(raw, param),
        param=f"{param}.parameters",
    )


def strict_of(raw: Mapping[str, Any], param: str) -> bool:
    """Whether arguments must follow the schema. Not said: they must, if the schema is closed."""
    strict = raw.get("strict")
    if strict is None:
        return _is_closed(raw.get("parameters"))
    if not isinstance(strict, bool):
        raise invalid(f"{param}.strict", "true or false")
    return strict


def _is_closed(schema: Any) -> bool:
    """As strict mode asks for: an object that requires all its properties and allows no others."""
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return False
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    named = {name for name in required if isinstance(name, str)}
    return schema.get("additionalProperties") is False and set(properties) == named


def _custom_format(given: Any, param: str) -> GrammarSpec | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise invalid(param, "an object")
    kind = given.get("type")
    if kind not in ("text", "grammar"):
        raise invalid(f"{param}.type", "'text' or 'grammar'")
    check_fields(given, ("type",) if kind == "text" else ("type", "syntax", "definition"), param)
    if kind == "text":
        return None
    syntax, definition = given.get("syntax"), given.get("definition")
    if syntax not in ("lark", "regex"):
        raise invalid(f"{param}.syntax", "'lark' or 'regex'")
    if not isinstance(definition, str) or not 0 < len(definition) <= MAX_GRAMMAR_CHARS:
        raise invalid(f"{param}.definition", f"a text of 1 to {MAX_GRAMMAR_CHARS} characters")
    return GrammarSpec(kind=syntax, text=definition)


def tool_choice_of(given: Any, tools: Sequence[Tool], *, is_parallel: bool) -> ToolChoice:
    """`none`, `auto`, `required`, one function or custom tool, or `allowed_tools`."""
    if given is None or given in ("auto", "none"):
        return ToolChoice(mode=given or "auto", is_parallel=is_parallel)
    if given == "required":
        _need_tools(tools)
        return ToolChoice(mode="required", is_parallel=is_parallel)
    if not isinstance(given, Mapping):
        raise invalid("tool_choice", "'none', 'auto', 'required' or an object")
    kind = given.get("type")
    if kind in _SERVED:
        check_fields(given, ("type", "name"), "tool_choice")
        _check_known(given.get("name"), kind, tools, "tool_choice.name")
        return ToolChoice(mode="required", names=(given["name"],), is_parallel=is_parallel)
    if kind == "allowed_tools":
        return _allowed(given, tools, is_parallel=is_parallel)
    raise InvalidRequest(
        f"Invalid value for 'tool_choice.type': {str(kind)[:60]!r} is not supported here; "
        "supported are 'function', 'custom' and 'allowed_tools'.",
        param="tool_choice.type",
        reason="unsupported_value",
    )


def _allowed(given: Mapping[str, Any], tools: Sequence[Tool], *, is_parallel: bool) -> ToolChoice:
    check_fields(given, ("type", "mode", "tools"), "tool_choice")
    mode, allowed = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.mode", "'auto' or 'required'")
    if not isinstance(allowed, list) or not 0 < len(allowed) <= MAX_TOOLS:
        raise invalid("tool_choice.tools", f"a list of 1 to {MAX_TOOLS} tools")
    names = []
    for index, tool in enumerate(allowed):
        where = f"tool_choice.tools.{index}"
        if not isinstance(tool, Mapping) or tool.get("type") not in _SERVED:
            raise invalid(f"{where}.type", "'function' or 'custom'")
        check_fields(tool, ("type", "name"), where)
        _check_known(tool.get("name"), tool["type"], tools, f"{where}.name")
        names.append(tool["name"])
    return ToolChoice(
        mode=mode,
        names=tuple(dict.fromkeys(names)),
        is_parallel=is_parallel,
    )


def _need_tools(tools: Sequence[Tool]) -> None:
    if not tools:
        raise InvalidRequest(
            "tool_choice 'required' needs tools", param="tool_choice", reason="invalid_value"
        )


def _check_known(name: Any, kind: Any, tools: Sequence[Tool], param: str) -> None:
    if not any(tool.name == name and tool.kind == kind for tool in tools):
        raise InvalidRequest(
            f"Tool choice {str(name)[:64]!r} not found in 'tools' parameter.",
            param=param,
            reason="invalid_value",
        )
