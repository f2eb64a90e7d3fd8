"""What a model's answer consists of, and the protocol of the parsers that find it in the text.

For every choice: `TextPart`s and `ReasoningPart`s in order; of a call `CallBegin`, any number of
`CallArguments`, `CallEnd`, with no other event between them. Calls are numbered from 0.
Nothing is lost: what looks like a call but is none comes back as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from finback.shared.codec.dialogue import Conversation, ToolKind
from finback.shared.wire.messages.generate import GrammarSpec


@dataclass(frozen=True, slots=True)
class TextPart:
    """Content that the user is shown; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text inside the model's reasoning span; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins: its name is whole. `call_id` is fresh, or the model's own if it writes one."""

    index: int
    call_id: str
    name: str
    kind: ToolKind = "function"


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text (joined: one object), or free text of a custom tool."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is over. `is_complete` False: it was cut off or malformed, as its arguments show."""

    index: int
    is_complete: bool = True


OutputEvent: TypeAlias = TextPart | ReasoningPart | CallBegin | CallArguments | CallEnd


class OutputParser(Protocol):
    """An explicit state machine over one choice's text; text may be held back until it is decided."""

    @property
    def is_reasoning(self) -> bool:
        """Is the text so far inside a reasoning span: what its tokens count as."""

    def push(self, text: str) -> Sequence[OutputEvent]:
        """More text (stop strings are cut off already, markers are in it)."""

    def finish(self) -> Sequence[OutputEvent]:
        """The text is over: what was held back, open calls ended or given back as text."""


class OutputFormat(Protocol):
    """How one model family writes reasoning and calls."""

    @property
    def name(self) -> str:
        """Of the format, as the model's card tells it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Spellings of control tokens that must reach the parser as text."""

    def parser(self, conversation: Conversation) -> OutputParser:
        """A parser for one choice of the answer to `conversation`."""

    def grammar(self, conversation: Conversation) -> GrammarSpec | None:
        """What constrains the whole answer (calls as this family spells them); None: nothing."""


class PlainParser:
    """Everything is content."""

    is_reasoning = False

    def push(self, text: str) -> Sequence[OutputEvent]:
        """See `OutputParser`."""
        return (TextPart(text),) if text else ()

    def finish(self) -> Sequence[OutputEvent]:
        """See `OutputParser`."""
        return ()


class PlainFormat:
    """A model that writes neither reasoning nor calls."""

    name = "plain"
    markers: tuple[str, ...] = ()

    def parser(self, conversation: Conversation) -> OutputParser:
        """See `OutputFormat`."""
        return PlainParser()

    def grammar(self, conversation: Conversation) -> GrammarSpec | None:
        """See `OutputFormat`."""
        return conversation.answer
