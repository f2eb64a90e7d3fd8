"""What the formats of all families have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from finback.shared.codec.dialogue import Conversation
from finback.shared.codec.formats.span_parser import SpanParser
from finback.shared.codec.formats.spans import Spans, Start
from finback.shared.codec.formats.surface import CallSurface, answer_grammar
from finback.shared.codec.formats.toolbox import Toolbox
from finback.shared.codec.output import OutputParser
from finback.shared.wire.messages.generate import GrammarSpec


@dataclass(frozen=True, slots=True)
class Starts:
    """Where an answer starts, by what the client said of thinking (None: nothing)."""

    by_thinking: Mapping[bool | None, Start] = field(default_factory=dict)

    def of(self, conversation: Conversation) -> Start:
        """How the answer to a conversation starts."""
        if conversation.continues_last:
            return "answer"
        return self.by_thinking.get(is_thinking(conversation), "answer")


def is_thinking(conversation: Conversation) -> bool | None:
    """Thinking on or off, as asked for: an effort of `none` is off, any other is on.

    What the caller set for the template itself wins.
    """
    for name in ("enable_thinking", "thinking"):
        given = (conversation.variables or {}).get(name)
        if isinstance(given, bool):
            return given
    if conversation.is_thinking is not None or conversation.effort is None:
        return conversation.is_thinking
    return conversation.effort != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyFormat:
    """An `OutputFormat` put together of a parser and a call surface."""

    name: str
    new_parser: Callable[[Spans, Toolbox, Start], SpanParser]
    family: CallSurface
    spans: Spans
    starts: Starts
    is_special: Callable[[str], bool]
    further_markers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """See `OutputFormat`."""
        spans = self.spans
        thinking = (spans.think_open, spans.think_close) if spans.think_open else ()
        return tuple(dict.fromkeys((*thinking, *spans.calls, *self.further_markers)))

    def parser(self, conversation: Conversation) -> OutputParser:
        """See `OutputFormat`."""
        start = self.starts.of(conversation)
        return self.new_parser(self.spans_of(conversation), Toolbox(conversation), start)

    def spans_of(self, conversation: Conversation) -> Spans:
        """Where the content is kept to a grammar from the first token on, it holds no reasoning."""
        is_kept = conversation.answer is not None and self.starts.of(conversation) == "answer"
        return replace(self.spans, think_open="") if is_kept else self.spans

    def grammar(self, conversation: Conversation) -> GrammarSpec | None:
        """See `OutputFormat`."""
        return answer_grammar(
            conversation,
            self.family,
            spans=self.spans,
            start=self.starts.of(conversation),
            is_special=self.is_special,
        )
