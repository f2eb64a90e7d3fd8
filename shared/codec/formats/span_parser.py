"""The part of every parser that is the same in all families: reasoning, content, where calls begin.

An explicit state machine: a state is a method that takes what it can from `_text` and says whether
it got on; False asks for more text. What is decided depends on the text alone, never on how it was
cut into pushes.

Blanks beside a marker belong to it: newlines at the edges of reasoning, blanks around calls, newlines
after `</think>`. Everything else comes out exactly once.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal

from finback.shared.codec.formats.marker_search import MAX_BLANKS, MarkerSearch
from finback.shared.codec.formats.spans import Spans, Start
from finback.shared.codec.formats.toolbox import Toolbox
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    ReasoningPart,
    TextPart,
)

# Work on at most so many characters at a time: keeps slicing of a long push linear.
PIECE_CHARS: Final = 4096
# What of a call may wait for its name.
MAX_HEAD_CHARS: Final = 64 * 1024


class SpanParser:
    """Base of the parsers. A subclass sets `_state` on in `_open_call` and reads calls from there.

    `start`: `opened` if the prompt ends inside a reasoning span, else the answer may open one.
    """

    def __init__(self, spans: Spans, toolbox: Toolbox, start: Start) -> None:
        self._spans = spans
        self._tools = toolbox
        self._text = ""
        self._is_last = False
        self._events: list[OutputEvent] = []
        # The span that text belongs to, and that a call that was none falls back into.
        self._span: type[TextPart | ReasoningPart] = TextPart
        # Blanks before a call marker, given back with it if it begins no call.
        self._lead = ""
        self._marker = ""
        self._call = 0
        calls = spans.calls if toolbox else ()
        self._in_text = MarkerSearch(calls)
        inside = calls if spans.is_call_in_reasoning else ()
        self._in_thought = MarkerSearch((spans.think_close, *inside))
        self._state: Callable[[], bool] = self._begin if spans.think_open else self._content
        if start == "opened":
            self._begin_reasoning()

    # -- the protocol

    @property
    def is_reasoning(self) -> bool:
        """Is the text read so far inside a reasoning span (for counting its tokens)."""
        return self._span is ReasoningPart

    def push(self, text: str) -> Sequence[OutputEvent]:
        """See `OutputParser`."""
        if len(text) <= PIECE_CHARS:
            self._text += text
            self._run()
        else:
            for at in range(0, len(text), PIECE_CHARS):
                self._text += text[at : at + PIECE_CHARS]
                self._run()
        events, self._events = self._events, []
        return events

    def finish(self) -> Sequence[OutputEvent]:
        """See `OutputParser`."""
        self._is_last = True
        self._run()
        self._close()
        events, self._events = self._events, []
        return events

    def _run(self) -> None:
        while self._state():
            pass

    def _close(self) -> None:
        """The text is over, and no state gets on: what is left is text."""
        self._give_back()

    # -- what comes out

    def _say(self, kind: type[TextPart | ReasoningPart], text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _begin_call(self, name: str, kind: Literal["function", "custom"], own_id: str = "") -> None:
        self._lead = ""
        self._span = TextPart
        self._call, call_id = self._tools.next_call(own_id)
        self._events.append(CallBegin(self._call, call_id, name, kind))

    def _say_arguments(self, text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, CallArguments):
            self._events[-1] = CallArguments(self._call, last.text + text)
        else:
            self._events.append(CallArguments(self._call, text))

    def _end_call(self, *, is_complete: bool = True) -> None:
        self._events.append(CallEnd(self._call, is_complete))

    # -- reasoning

    def _begin(self) -> bool:
        """At the very start: a reasoning span may be opened."""
        text, marker = self._text, self._spans.think_open
        stripped = text.lstrip()
        if stripped.startswith(marker):
            self._text = stripped[len(marker) :]
            self._begin_reasoning()
            return True
        could_open = marker.startswith(stripped) and len(text) - len(stripped) <= MAX_BLANKS
        if could_open and not self._is_last:
            return False
        self._state = self._content
        return True

    def _begin_reasoning(self) -> None:
        self._span = ReasoningPart
        self._state = self._reasoning_start

    def _reasoning_start(self) -> bool:
        return self._skip_newlines(self._reasoning)

    def _reasoning(self) -> bool:
        found = self._in_thought.find(self._text)
        if found is None:
            return self._pass_on(self._in_thought)
        start, marker = found
        if marker != self._spans.think_close:
            return self._at_call(self._in_thought, start, marker)
        self._say(ReasoningPart, self._text[: self._in_thought.edge(self._text, start)])
        self._text = self._text[start + len(marker) :]
        self._span = TextPart
        self._state = self._answer_start
        return True

    def _answer_start(self) -> bool:
        return self._skip_newlines(self._content)

    def _skip_newlines(self, then: Callable[[], bool]) -> bool:
        self._text = self._text.lstrip("\r\n")
        if not self._text:
            return False
        self._state = then
        return True

    # -- content

    def _content(self) -> bool:
        found = self._in_text.find(self._text)
        if found is None:
            return self._pass_on(self._in_text)
        return self._at_call(self._in_text, *found)

    def _pass_on(self, search: MarkerSearch) -> bool:
        """Let text through, but for what may be the beginning of a marker."""
        cut = len(self._text) if self._is_last else search.held_from(self._text)
        if cut:
            self._say(self._span, self._text[:cut])
            self._text = self._text[cut:]
        return False

    def _at_call(self, search: MarkerSearch, start: int, marker: str) -> bool:
        edge = search.edge(self._text, start)
        self._say(self._span, self._text[:edge])
        self._lead, self._marker = self._text[edge:start], marker
        self._text = self._text[start:]
        self._open_call()
        return True

    def _open_call(self) -> None:
        """`_text` begins with `_marker`: set the state that reads a call."""
        raise NotImplementedError

    def _no_call(self) -> bool:
        """What the marker opened is no call: it is text, and what follows is looked at again."""
        size = len(self._marker)
        self._say(self._span, self._lead + self._text[:size])
        self._text = self._text[size:]
        self._lead = self._marker = ""
        self._resume()
        return True

    def _resume(self) -> None:
        self._state = self._reasoning if self._span is ReasoningPart else self._content

    def _after_call(self) -> bool:
        """Blanks behind a call are not content."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._state = self._content
        return True

    def _give_back(self) -> None:
        self._say(self._span, self._lead + self._text)
        self._text = self._lead = ""
