"""What a model of the Hermes kind writes, and tools to call, for tests that script its answers."""

import json
from typing import Any, Final

PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two numbers", "parameters": PARAMETERS},
}
NOW: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now"}}
NOTE: Final[dict[str, Any]] = {"type": "custom", "custom": {"name": "note"}}
CLAUDE_ADD: Final[dict[str, Any]] = {
    "name": "add",
    "description": "Adds two numbers",
    "input_schema": PARAMETERS,
}


def thought(text: str) -> str:
    """A reasoning span."""
    return f"<think>\n{text}\n</think>\n\n"


def call(tool: str, **arguments: Any) -> str:
    """A call of a tool."""
    body = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def user(text: str) -> list[dict[str, Any]]:
    """A conversation that has the model say `text`."""
    return [{"role": "user", "content": text}]
