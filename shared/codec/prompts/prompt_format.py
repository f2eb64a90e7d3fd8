"""The protocol of everything that turns a conversation into a prompt."""

from typing import Protocol

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.dialogue import Conversation


class PromptFormat(Protocol):
    """Renders prompts of one model. Thread-safe."""

    @property
    def name(self) -> str:
        """Of the format."""

    def render(self, conversation: Conversation) -> list[str | ControlToken]:
        """The prompt that asks for the next turn: text stretches, and control tokens by id.

        Control spellings in anything that the caller supplied stay text. Raises `InvalidRequest`.
        """
