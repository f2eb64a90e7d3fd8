"""The tools that one answer may call, and fresh ids for its calls."""

import secrets
from collections.abc import Callable

from finback.shared.codec.dialogue import Conversation, Tool

# The one parameter of a custom tool where a format only knows parameters.
CUSTOM_INPUT = "input"


def callable_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that may be called: none under `none`, else those named, or all."""
    choice = conversation.tool_choice
    if choice.mode == "none":
        return ()
    if not choice.names:
        return conversation.tools
    return tuple(tool for tool in conversation.tools if tool.name in choice.names)


def new_call_id() -> str:
    """A call id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


class Toolbox:
    """Knows tools by name, numbers the calls of one choice."""

    __slots__ = ("_by_name", "_new_id", "num_calls")

    def __init__(
        self, conversation: Conversation, *, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._by_name = {tool.name: tool for tool in callable_tools(conversation)}
        self._new_id = new_id
        self.num_calls = 0

    def __bool__(self) -> bool:
        return bool(self._by_name)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(self._by_name.values())

    def find(self, name: str) -> Tool | None:
        """The tool of that name, if it may be called."""
        return self._by_name.get(name)

    def next_call(self, call_id: str | None) -> tuple[int, str]:
        """The index of the next call, and its id: the model's own if it wrote one."""
        self.num_calls += 1
        return self.num_calls - 1, call_id or self._new_id()
