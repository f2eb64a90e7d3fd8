"""The text of one choice through its parser: parts, the logprobs of content, stops in content.

Stop strings are looked for in content only: a model must be able to think and to write arguments
whatever a client does not want to read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from finback.shared.codec.answer_text import AnswerText, StopHit
from finback.shared.codec.doubtful_stops import DoubtfulStops
from finback.shared.codec.output import (
    OutputEvent,
    OutputParser,
    PlainParser,
    ReasoningPart,
    TextPart,
)
from finback.shared.codec.stop_strings import StopMatcher
from finback.shared.wire.messages.generate import TokenLogprob

Logprobs = tuple[tuple[int, TokenLogprob], ...]


@dataclass(frozen=True, slots=True)
class ParsedDelta:
    """What some tokens added. `text` is the content among `parts`, `logprobs` that of its tokens."""

    parts: tuple[OutputEvent, ...] = ()
    text: str = ""
    logprobs: Logprobs = ()
    stop: StopHit | None = None


_NOTHING: Final = ParsedDelta()


class RawText:
    """One choice that is not parsed, in the same form."""

    num_reasoning_tokens = 0

    def __init__(self, text: AnswerText[TokenLogprob]) -> None:
        self._text = text

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> ParsedDelta:
        """Add tokens."""
        found = self._text.push(token_ids, logprobs)
        return ParsedDelta((), found.text, found.logprobs, found.stop)

    @property
    def doubt(self) -> str | None:
        """See `ParsedText`."""
        return self._text.doubt

    def decide(self, is_stop: bool) -> ParsedDelta:
        """See `ParsedText`."""
        found = self._text.decide(is_stop)
        return ParsedDelta((), found.text, found.logprobs, found.stop)

    def finish(self) -> ParsedDelta:
        """The completion is over: whatever was held back."""
        found = self._text.finish()
        return ParsedDelta((), found.text, found.logprobs, found.stop)


class ParsedText:
    """One choice. After a stop nothing more may be pushed."""

    def __init__(
        self,
        text: AnswerText[TokenLogprob],
        parser: OutputParser,
        *,
        stops: Sequence[str],
        min_tokens: int,
        token_bytes: Callable[[int], bytes],
        is_doubtful: bool = False,
    ) -> None:
        """`text` detokenises and looks for no stops.

        `is_doubtful`: a stop string waits in `doubt` until somebody decides; push single tokens.
        """
        self.num_reasoning_tokens = 0
        self._text = text
        self._parser = parser
        self._doubtful = DoubtfulStops(stops) if stops and is_doubtful else None
        self._matcher = self._doubtful or (StopMatcher(stops) if stops else None)
        # What came behind a stop string in doubt, of the same token.
        self._stalled: list[OutputEvent] = []
        self._is_plain = isinstance(parser, PlainParser)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._waiting = _WaitingLogprobs(token_bytes)
        self._parts: list[OutputEvent] = []
        self._logprobs: list[tuple[int, TokenLogprob]] = []

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None
    ) -> ParsedDelta:
        """Add tokens, one by one: each is counted as what it turns out to be."""
        if logprobs is None and self._matcher is None and (self._is_plain or len(token_ids) == 1):
            return self._push_at_once(token_ids)
        for at, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if logprobs is not None:
                self._waiting.add(token_id, logprobs[at])
            text = self._text.push((token_id,)).text
            if text:
                matched = self._take(self._parser.push(text))
                if matched is not None:
                    return self._delta(StopHit(matched, self._num_tokens))
            self.num_reasoning_tokens += self._parser.is_reasoning
        return self._delta(None)

    def _push_at_once(self, token_ids: Sequence[int]) -> ParsedDelta:
        """The common case: nothing to look for, and the tokens are all of one kind."""
        parser = self._parser
        self._num_tokens += len(token_ids)
        text = self._text.push(token_ids).text
        events = parser.push(text) if text else ()
        self.num_reasoning_tokens += parser.is_reasoning
        if not events:
            return _NOTHING
        if len(events) == 1:
            event = events[0]
            return ParsedDelta((event,), event.text if isinstance(event, TextPart) else "")
        self._parts.extend(events)
        return self._delta(None)

    @property
    def doubt(self) -> str | None:
        """The content from a stop string in doubt on; None: there is none."""
        return self._doubtful.doubt if self._doubtful is not None else None

    def decide(self, is_stop: bool) -> ParsedDelta:
        """Settle the stop string in doubt; another may be in doubt then."""
        if self._doubtful is None:
            raise ValueError("no stop string is in doubt")
        found = self._doubtful.decide(is_stop)
        self._show(found.text)
        if found.matched is not None:
            return self._delta(StopHit(found.matched, self._num_tokens))
        if self.doubt is None:
            stalled, self._stalled = self._stalled, []
            self._take(stalled)
        return self._delta(None)

    def finish(self) -> ParsedDelta:
        """The completion is over: whatever was held back."""
        if self._doubtful is not None:
            self._doubtful.close()
        text = self._text.finish().text
        events = (*(self._parser.push(text) if text else ()), *self._parser.finish())
        matched = self._take(events)
        if matched is not None:
            return self._delta(StopHit(matched, self._num_tokens))
        self._release()
        return self._delta(None)

    def _take(self, events: Sequence[OutputEvent]) -> str | None:
        """Keep events; the stop string that one of them completed."""
        for at, event in enumerate(events):
            if isinstance(event, TextPart):
                matched = self._content(event.text)
                if matched is not None:
                    return matched
                if self.doubt is not None:
                    self._stalled.extend(events[at + 1 :])
                    return None
                continue
            self._release()
            self._waiting.skip(event.text if isinstance(event, ReasoningPart) else None)
            self._parts.append(event)
        return None

    def _content(self, text: str) -> str | None:
        if self._matcher is None or self._num_tokens < self._min_tokens:
            self._show(text)
            return None
        scan = self._matcher.push(text)
        self._show(scan.text)
        return scan.matched

    def _release(self) -> None:
        """What was held back can be no stop string: something else follows."""
        if self._matcher is not None:
            self._show(self._matcher.finish())

    def _show(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))
            self._logprobs.extend(self._waiting.take(text))

    def _delta(self, stop: StopHit | None) -> ParsedDelta:
        parts, self._parts = tuple(_joined(self._parts)), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        return ParsedDelta(parts, text, logprobs, stop)


class _WaitingLogprobs:
    """Tokens whose text is not told yet, to be found again by the bytes of what is told."""

    __slots__ = ("_bytes", "_num_ahead", "_token_bytes", "_tokens")

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._tokens: deque[tuple[int, TokenLogprob, int]] = deque()
        self._bytes = bytearray()
        # How many bytes of text to come belong to the token that was told last.
        self._num_ahead = 0

    def add(self, token_id: int, logprob: TokenLogprob) -> None:
        raw = self._token_bytes(token_id)
        self._tokens.append((token_id, logprob, len(raw)))
        self._bytes += raw

    def take(self, text: str) -> list[tuple[int, TokenLogprob]]:
        """The tokens that wrote `text`; those before it wrote markers, and are dropped."""
        raw = text.encode()
        num_told = min(self._num_ahead, len(raw))
        self._num_ahead -= num_told
        raw = raw[num_told:]
        if not raw or not self._tokens:
            return []
        found = self._bytes.find(raw)
        # Bytes that are no text are shown as something else: then all of them are meant.
        start, end = (found, found + len(raw)) if found >= 0 else (0, len(self._bytes))
        taken, at = [], 0
        while self._tokens and at < end:
            token_id, logprob, size = self._tokens.popleft()
            at += size
            if size and at > start:
                taken.append((token_id, logprob))
        self._num_ahead = at - end
        del self._bytes[:at]
        return taken

    def skip(self, text: str | None) -> None:
        """Drop the tokens that wrote a text that is no content; None: all of them."""
        if text is not None:
            self.take(text)
        else:
            self._tokens.clear()
            self._bytes.clear()
        self._num_ahead = 0


def _joined(parts: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Neighbouring texts of one kind as one."""
    joined: list[OutputEvent] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            joined[-1] = TextPart(last.text + part.text)
        elif isinstance(part, ReasoningPart) and isinstance(last, ReasoningPart):
            joined[-1] = ReasoningPart(last.text + part.text)
        else:
            joined.append(part)
    return joined
