"""Turns and tools in the shapes that Hugging Face chat templates expect."""

import json
from typing import Any

from finback.shared.codec.dialogue import Conversation, Tool, ToolCall, Turn
from finback.shared.codec.formats.base import is_thinking
from finback.shared.codec.formats.surface import needs_raw_text
from finback.shared.codec.formats.toolbox import CUSTOM_INPUT
from finback.shared.codec.strict_json import loads_strictly


def tool_json(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates expect it; a custom one takes its text as a parameter."""
    function: dict[str, Any] = {"name": tool.name}
    if description := tool_description(tool):
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": tool_parameters(tool)}}


def tool_description(tool: Tool) -> str:
    """What the model is told of a tool; of a custom one also how its text is given."""
    if not needs_raw_text(tool):
        return tool.description
    how = f'Call it as {{"name": {json.dumps(tool.name)}}} and give its input as text behind that.'
    return f"{tool.description}\n{how}" if tool.description else how


def tool_parameters(tool: Tool) -> dict[str, Any]:
    """The JSON Schema of a tool's parameters."""
    if tool.kind == "custom":
        text = {"type": "string", "description": "The whole input, as free text."}
        return {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
    if tool.parameters is None:
        return {"type": "object", "properties": {}}
    return dict(tool.parameters)


def turn_json(turn: Turn) -> dict[str, Any]:
    """A turn as chat templates expect it: arguments of calls are objects where they are JSON."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        # Templates know it under several names.
        message |= {"reasoning_content": turn.reasoning, "thinking": turn.reasoning}
    if turn.tool_calls:
        message["tool_calls"] = [_call_json(call) for call in turn.tool_calls]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": turn.name}
    return message


def _call_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call_arguments(call)}
    return {"id": call.call_id, "type": "function", "function": function}


def call_arguments(call: ToolCall) -> Any:
    """A call's arguments: an object where they are one, else the text that they are."""
    if call.kind == "custom":
        return {CUSTOM_INPUT: call.arguments}
    try:
        found = loads_strictly(call.arguments or "{}")
    except ValueError:
        return call.arguments
    return found if isinstance(found, dict) else call.arguments


def variables_of(conversation: Conversation) -> dict[str, Any]:
    """A template's variables besides messages, tools and documents.

    Thinking is told under the names that published templates use; what the caller set wins.
    """
    thinking: dict[str, Any] = {}
    if (asked := is_thinking(conversation)) is not None:
        thinking = {"enable_thinking": asked, "thinking": asked}
    if conversation.effort is not None:
        thinking["reasoning_effort"] = conversation.effort
    return thinking | dict(conversation.variables or {})
