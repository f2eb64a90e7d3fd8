"""The tools of a chat request, and which of them may, must or must not be called."""

from typing import Any, Final

from finback.services.gateway.chat_schema import (
    MAX_TOOLS,
    ChatRequest,
    CustomDefinition,
    FunctionDefinition,
    ToolDefinition,
)
from finback.services.gateway.known_fields import check_fields
from finback.services.gateway.tool_rules import (
    check_name,
    check_parameters,
    check_unique,
    invalid_value,
    missing,
)
from finback.shared.codec.dialogue import Tool, ToolChoice
from finback.shared.wire.messages.generate import GrammarSpec

MAX_NAME_CHARS: Final = 64
_WORDS: Final = ("none", "auto", "required")


def tools_of(request: ChatRequest) -> tuple[Tool, ...]:
    """The tools, each checked; two of one name are refused."""
    tools = [_tool(found, f"tools.{at}") for at, found in enumerate(request.tools or ())]
    kinds = [found.type for found in request.tools or ()]
    check_unique(
        (tool.name, f"tools.{at}.{kind}.name")
        for at, (tool, kind) in enumerate(zip(tools, kinds, strict=True))
    )
    return tuple(tools)


def _tool(found: ToolDefinition, param: str) -> Tool:
    if found.type == "function":
        if found.function is None:
            raise missing(f"{param}.function")
        return _function(found.function, f"{param}.function")
    if found.custom is None:
        raise missing(f"{param}.custom")
    return _custom(found.custom, f"{param}.custom")


def _function(found: FunctionDefinition, param: str) -> Tool:
    check_name(found.name, f"{param}.name", MAX_NAME_CHARS)
    if found.parameters is not None:
        check_parameters(found.parameters, f"{param}.parameters")
    return Tool(
        name=found.name,
        description=found.description or "",
        parameters=found.parameters,
        strict=bool(found.strict),
        param=f"{param}.parameters",
    )


def _custom(found: CustomDefinition, param: str) -> Tool:
    check_name(found.name, f"{param}.name", MAX_NAME_CHARS)
    grammar = None
    if found.format is not None and found.format.type == "grammar":
        given = found.format.grammar
        if given is None:
            raise missing(f"{param}.format.grammar")
        grammar = GrammarSpec(kind=given.syntax, text=given.definition)
    return Tool(
        name=found.name,
        description=found.description or "",
        kind="custom",
        grammar=grammar,
        param=f"{param}.format.grammar.definition",
    )


def tool_choice_of(request: ChatRequest, tools: tuple[Tool, ...]) -> ToolChoice:
    """The choice; a tool that it names must be there, in the kind that it says."""
    is_parallel = request.parallel_tool_calls is not False
    given = request.tool_choice
    if given is None or isinstance(given, str):
        return _by_word("auto" if given is None else given, tools, is_parallel=is_parallel)
    kind = given.get("type")
    if kind in ("function", "custom"):
        name = _named(given, "tool_choice", tools)
        return ToolChoice(mode="required", names=(name,), is_parallel=False)
    if kind == "allowed_tools":
        check_fields(given, ("type", "allowed_tools"), "tool_choice")
        return _allowed(given.get("allowed_tools"), tools, is_parallel=is_parallel)
    raise invalid_value("tool_choice.type", "'function', 'custom' or 'allowed_tools'")


def _by_word(word: str, tools: tuple[Tool, ...], *, is_parallel: bool) -> ToolChoice:
    if word not in _WORDS:
        raise invalid_value("tool_choice", "'none', 'auto', 'required' or an object")
    if word == "required":
        if not tools:
            raise invalid_value("tool_choice", "'none' or 'auto' where there are no tools")
        return ToolChoice(mode="required", is_parallel=is_parallel)
    return ToolChoice(mode="none" if word == "none" else "auto", is_parallel=is_parallel)


def _allowed(given: Any, tools: tuple[Tool, ...], *, is_parallel: bool) -> ToolChoice:
    param = "tool_choice.allowed_tools"
    if not isinstance(given, dict):
        raise invalid_value(param, "an object with mode and tools")
    check_fields(given, ("mode", "tools"), param)
    mode, listed = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise invalid_value(f"{param}.mode", "'auto' or 'required'")
    if not isinstance(listed, list) or not listed:
        raise invalid_value(f"{param}.tools", "a non-empty list of tools")
    if len(listed) > MAX_TOOLS:
        raise invalid_value(f"{param}.tools", f"a list of at most {MAX_TOOLS} tools")
    names = [_named(item, f"{param}.tools.{at}", tools) for at, item in enumerate(listed)]
    return ToolChoice(mode=mode, names=tuple(dict.fromkeys(names)), is_parallel=is_parallel)


def _named(given: Any, param: str, tools: tuple[Tool, ...]) -> str:
    """The name in `{"type": kind, kind: {"name": name}}`."""
    kind = given.get("type") if isinstance(given, dict) else None
    if kind not in ("function", "custom"):
        raise invalid_value(f"{param}.type", "'function' or 'custom'")
    holder = given.get(kind)
    name = holder.get("name") if isinstance(holder, dict) else None
    if not isinstance(holder, dict) or not isinstance(name, str):
        raise missing(f"{param}.{kind}.name")
    check_fields(given, ("type", kind), param)
    check_fields(holder, ("name",), f"{param}.{kind}")
    if not any(tool.name == name and tool.kind == kind for tool in tools):
        raise invalid_value(
            f"{param}.{kind}.name", f"the name of a {kind} tool in 'tools', not '{name[:64]}'"
        )
    return name
