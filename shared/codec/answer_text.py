"""The text of one choice as its tokens come: detokenised, cut at stop strings, with logprobs."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from finback.shared.codec.detokenizer import Detokenizer
from finback.shared.codec.doubtful_stops import DoubtfulStops
from finback.shared.codec.stop_strings import StopMatcher
from finback.shared.codec.tokenizer import Tokenizer

L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class StopHit:
    """A stop string ended the choice: which one, and after how many tokens it was complete."""

    matched: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta(Generic[L]):
    """New text, and the (token id, logprobs) of the tokens whose text it completes.

    At a stop string also those of the token that it begins in the middle of, whose first part is
    shown: all text has logprobs, tokens of which nothing is shown have none.
    """

    text: str
    logprobs: tuple[tuple[int, L], ...] = ()
    stop: StopHit | None = None


class AnswerText(Generic[L]):
    """Turns one choice's ids into text. Stop strings are not looked for before `min_tokens`.

    Text may come later than its tokens: a character is held until it is whole, and what could be
    the beginning of a stop string until that is decided. Logprobs wait for their text.
    """

    __slots__ = ("_bytes_of", "_detokenizer", "_doubtful", "_matcher", "_min_tokens", "_num_chars",
                 "_num_released", "_num_shown", "_num_tokens", "_waiting")  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        shown: Mapping[int, bytes] | None = None,
        is_doubtful: bool = False,
    ) -> None:
        """`shown`: control tokens that are text all the same, for whoever parses the answer.

        `is_doubtful`: a stop string waits in `doubt` until somebody decides; push single tokens.
        """
        self._bytes_of = tokenizer.token_bytes
        if shown:
            token_bytes = tokenizer.token_bytes
            self._bytes_of = lambda token_id: shown.get(token_id) or token_bytes(token_id)
        self._detokenizer = Detokenizer()
        self._doubtful = DoubtfulStops(stops) if stops and is_doubtful else None
        self._matcher = self._doubtful or (StopMatcher(stops) if stops else None)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        # Characters decoded and characters shown so far; they differ by what is held back.
        self._num_chars = 0
        self._num_shown = 0
        # Where the text of the last token ends whose logprobs were told.
        self._num_released = 0
        self._waiting: deque[tuple[int, int, L]] = deque()

    def push(self, token_ids: Sequence[int], logprobs: Sequence[L] | None = None) -> TextDelta[L]:
        """Add tokens (and one logprob entry each); after a stop hit nothing more may be added."""
        if self._matcher is None and logprobs is None:
            self._num_tokens += len(token_ids)
            return TextDelta(self._detokenizer.push(b"".join(map(self._bytes_of, token_ids))))
        shown = ""
        for index, token_id in enumerate(token_ids):
            text = self._decode(token_id, None if logprobs is None else logprobs[index])
            visible, matched = self._scan(text)
            shown += visible
            if matched is not None:
                return self._delta(shown, StopHit(matched, self._num_tokens))
        return self._delta(shown, None)

    @property
    def doubt(self) -> str | None:
        """The text from a stop string in doubt on; None: there is none."""
        return self._doubtful.doubt if self._doubtful is not None else None

    def decide(self, is_stop: bool) -> TextDelta[L]:
        """Settle the stop string in doubt; another may be in doubt then."""
        if self._doubtful is None:
            raise ValueError("no stop string is in doubt")
        found = self._doubtful.decide(is_stop)
        hit = None if found.matched is None else StopHit(found.matched, self._num_tokens)
        return self._delta(found.text, hit)

    def finish(self) -> TextDelta[L]:
        """The completion is over: whatever was held back."""
        if self._doubtful is not None:
            self._doubtful.close()
        text = self._detokenizer.finish()
        self._num_chars += len(text)
        shown, matched = self._scan(text)
        if matched is None and self._matcher is not None:
            shown += self._matcher.finish()
        hit = None if matched is None else StopHit(matched, self._num_tokens)
        return self._delta(shown, hit, is_last=True)

    def _decode(self, token_id: int, logprob: L | None) -> str:
        text = self._detokenizer.push(self._bytes_of(token_id))
        self._num_tokens += 1
        self._num_chars += len(text)
        if logprob is not None:
            # A token that ends inside a character belongs to the text that completes it.
            end = self._num_chars + self._detokenizer.is_mid_character
            self._waiting.append((end, token_id, logprob))
        return text

    def _scan(self, text: str) -> tuple[str, str | None]:
        if self._matcher is None or self._num_tokens < self._min_tokens:
            return text, None
        result = self._matcher.push(text)
        return result.text, result.matched

    def _delta(self, shown: str, stop: StopHit | None, *, is_last: bool = False) -> TextDelta[L]:
        self._num_shown += len(shown)
        released = []
        is_all = is_last and stop is None
        while self._waiting and (
            is_all
            or self._waiting[0][0] <= self._num_shown
            or (stop is not None and self._num_released < self._num_shown)
        ):
            self._num_released, token_id, logprob = self._waiting.popleft()
            released.append((token_id, logprob))
        return TextDelta(shown, tuple(released), stop)
