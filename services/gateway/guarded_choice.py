"""A choice that is kept to a grammar, with stops of the caller's own.

A stop string, or a stop token of the caller's, ends such an answer only where what stands before it
is a whole answer by the grammar; elsewhere it is text like any other. So the choice waits, in doubt,
until the grammar has been asked. Tokens are read one by one, and those behind a doubt wait.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from finback.services.gateway.answer_events import ChoiceEvent
from finback.services.gateway.choice_text import ChoiceText, Reading
from finback.services.gateway.generation import Choice, Generation, Piece

# What a parser may have kept back behind a stop string: the beginning of a marker.
_MAX_KEPT_BYTES = 64

# (the choice, token ids of its first part) -> is that part a whole answer
Verdict = Callable[[Generation, Choice, Sequence[int]], "asyncio.Task[bool]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What decides. `token_bytes`: of a token as the text shows it; `encode`: text to ids.

    `own_ids`: the caller's stop tokens. `wake`: there is a verdict.
    """

    verdict: Verdict
    token_bytes: Callable[[int], bytes]
    encode: Callable[[str], list[int]]
    own_ids: frozenset[int]
    wake: Callable[[], None]


class GuardedChoice(ChoiceText):
    """One choice; `push` and `settle` go as far as nothing is in doubt."""

    def __init__(
        self, reading: Reading, generation: Generation, choice: Choice, index: int, guard: Guard
    ) -> None:
        super().__init__(reading, generation, choice, index)
        self._guard = guard
        self._queue: deque[Piece] = deque()
        self._spelled = SpelledTokens(guard.token_bytes)
        # The caller's stop token that is in doubt.
        self._doubted: Piece | None = None
        self._asked: asyncio.Task[bool] | None = None

    @property
    def is_in_doubt(self) -> bool:
        """Does it wait for a verdict."""
        return self._asked is not None

    def push(self, piece: Piece) -> ChoiceEvent | None:
        """See `ChoiceText`."""
        self._queue.extend(_single(piece))
        return self._advance([])

    def settle(self) -> ChoiceEvent | None:
        """Go on with the verdict, if it is there. Raises what kept it from coming."""
        if self._asked is None or not self._asked.done():
            return None
        is_stop, self._asked = self._asked.result(), None
        doubted, self._doubted = self._doubted, None
        if doubted is not None:
            first = self._decide_token(doubted, is_stop)
        else:
            delta = self._text.decide(is_stop)
            if delta.stop is not None:
                return self._stopped(delta, delta.stop.matched, delta.stop.num_tokens)
            first = self._event(delta, 0, ())
        return self._advance([first])

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if self._asked is not None:
            self._asked.cancel()

    def _advance(self, events: list[ChoiceEvent | None]) -> ChoiceEvent | None:
        while not self.is_told and not self._ask() and self._queue:
            piece = self._queue.popleft()
            ids = memoryview(piece.token_ids).cast("i").tolist()
            if piece.end is None and ids and ids[0] in self._guard.own_ids:
                self._doubted = piece
                continue
            events.append(self._read(piece, ids))
        return _joined([event for event in events if event is not None])

    def _read(self, piece: Piece, ids: Sequence[int]) -> ChoiceEvent | None:
        self._spelled.add(ids)
        return super().push(piece)

    def _decide_token(self, piece: Piece, is_stop: bool) -> ChoiceEvent | None:
        ids = memoryview(piece.token_ids).cast("i").tolist()
        if not is_stop:
            return self._read(piece, ids)
        event = self._stopped(self._text.finish(), ids[0], len(self._spelled) + 1)
        return replace(event, token_ids=tuple(ids)) if self._reading.has_token_ids else event

    def _ask(self) -> bool:
        """Ask about what is in doubt; is anything."""
        prefixes = self._doubtful_prefixes()
        if prefixes is None:
            return False
        task = asyncio.create_task(self._all_whole(prefixes))
        task.add_done_callback(lambda _: self._guard.wake())
        self._asked = task
        return True

    def _doubtful_prefixes(self) -> list[list[int]] | None:
        """What may stand before the stop in doubt, as tokens; None: there is no doubt."""
        if self._doubted is not None:
            return [self._spelled.ids]
        doubt = self._text.doubt
        if doubt is None:
            return None
        found = self._spelled.find(doubt.encode())
        return [self._spelled.cut(at, self._guard.encode) for at in found]

    async def _all_whole(self, prefixes: Sequence[Sequence[int]]) -> bool:
        for prefix in prefixes:
            if not await self._guard.verdict(self._generation, self.choice, prefix):
                return False
        return bool(prefixes)


class SpelledTokens:
    """The tokens read so far, and where in the answer's bytes each ends."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self.ids: list[int] = []
        self._token_bytes = token_bytes
        self._raw = bytearray()
        self._ends: list[int] = []
        self._found = -1

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[int]) -> None:
        """More tokens."""
        for token_id in ids:
            self.ids.append(token_id)
            self._raw += self._token_bytes(token_id)
            self._ends.append(len(self._raw))

    def find(self, text: bytes) -> list[int]:
        """Where a text begins that was read a moment ago: the places that it may be.

        It ends what was read, or a parser keeps back what follows: then it may look the same there.
        """
        last = self._raw.rfind(text)
        if last < 0:
            return []
        least = max(self._found + 1, len(self._raw) - len(text) - _MAX_KEPT_BYTES)
        self._found = last
        before = self._raw.rfind(text, least, last + len(text) - 1)
        return [last] if before < 0 else [last, before]

    def cut(self, at: int, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokens of the first `at` bytes: as they came, the last bytes encoded anew."""
        num_whole = bisect_right(self._ends, at)
        while True:
            start = self._ends[num_whole - 1] if num_whole else 0
            try:
                rest = bytes(self._raw[start:at]).decode()
            except UnicodeDecodeError:  # a token ends inside of a character
                num_whole -= 1
                continue
            return self.ids[:num_whole] + (encode(rest) if rest else [])


def _single(piece: Piece) -> list[Piece]:
    """One piece a token; an end that is no token's own comes by itself."""
    ids = memoryview(piece.token_ids).cast("i").tolist()
    made = [
        Piece(
            piece.token_ids[4 * at : 4 * at + 4],
            None if piece.logprobs is None else piece.logprobs[at : at + 1],
            None,
        )
        for at in range(len(ids))
    ]
    if piece.end is not None and ids and ids[-1] == piece.end.stop_token_id:
        made[-1].end = piece.end
    elif piece.end is not None:
        made.append(Piece(b"", None if piece.logprobs is None else (), piece.end))
    return made


def _joined(events: Sequence[ChoiceEvent]) -> ChoiceEvent | None:
    """Events of one choice as one."""
    if len(events) < 2:
        return events[0] if events else None
    return replace(
        events[-1],
        text="".join(event.text for event in events),
        logprobs=tuple(entry for event in events for entry in event.logprobs),
        parts=tuple(part for event in events for part in event.parts),
        num_tokens=sum(event.num_tokens for event in events),
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
    )
