"""The tools of a Messages request, and which of them may, must or must not be called."""

from typing import Final

from finback.services.gateway.messages_schema import CountTokensRequest, MessagesTool
from finback.services.gateway.tool_rules import (
    check_name,
    check_parameters,
    check_unique,
    invalid_value,
    missing,
    unsupported,
)
from finback.shared.codec.dialogue import Tool, ToolChoice
from finback.shared.errors import InvalidRequest

MAX_NAME_CHARS: Final = 128
_HINTS: Final = frozenset(
    {
        "allowed_callers",
        "cache_control",
        "defer_loading",
        "eager_input_streaming",
        "input_examples",
    }
)


def tools_of(request: CountTokensRequest) -> tuple[Tool, ...]:
    """The tools, each checked; two of one name are refused."""
    tools = [_tool(found, f"tools.{at}") for at, found in enumerate(request.tools or ())]
    check_unique((tool.name, f"tools.{at}.name") for at, tool in enumerate(tools))
    return tuple(tools)


def _tool(found: MessagesTool, param: str) -> Tool:
    if found.type not in (None, "custom"):
        raise unsupported(
            f"{param}.type",
            f"tools of type '{found.type[:40]}' are Anthropic's own and not known here; give a tool "
            "of your own with an input_schema",
        )
    for name in found.model_extra or ():
        if name not in _HINTS:
            where = f"{param}.{name[:64]}"
            raise InvalidRequest(f"{where}: Extra inputs are not permitted", param=where)
    check_name(found.name, f"{param}.name", MAX_NAME_CHARS)
    if found.input_schema is None:
        raise missing(f"{param}.input_schema")
    check_parameters(found.input_schema, f"{param}.input_schema")
    return Tool(
        name=found.name,
        description=found.description or "",
        parameters=found.input_schema,
        strict=bool(found.strict),
        param=f"{param}.input_schema",
    )


def tool_choice_of(request: CountTokensRequest, tools: tuple[Tool, ...]) -> ToolChoice:
    """The choice; a tool that it names must be there."""
    choice = request.tool_choice
    if choice is None:
        return ToolChoice()
    is_parallel = not choice.disable_parallel_tool_use
    if choice.type in ("any", "tool") and not tools:
        raise invalid_value("tool_choice", "'auto' or 'none' where there are no tools")
    if choice.type != "tool":
        mode = "required" if choice.type == "any" else choice.type
        return ToolChoice(mode=mode, is_parallel=is_parallel)
    if choice.name is None:
        raise missing("tool_choice.name")
    if not any(tool.name == choice.name for tool in tools):
        raise invalid_value(
            "tool_choice.name", f"the name of a tool in 'tools', not '{choice.name[:64]}'"
        )
    return ToolChoice(mode="required", names=(choice.name,), is_parallel=is_parallel)
