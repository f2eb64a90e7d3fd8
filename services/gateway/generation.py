"""One generation from placement to its end: attempts, rows in order, what was taken, how it ended.

It knows ids only; text is made by whoever takes the rows. The token stream calls `accept`, the
watch calls `lose`, one task runs `run` (in `lifecycle.py`), one consumer calls `take`. A later
attempt goes on behind the tokens that came: nothing that was received is ever received again.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from finback.shared.actor.deadline import Deadline
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvariantViolated, ServingError, Unavailable, from_code
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    TokenLogprob,
    TokenRow,
)
from finback.shared.wire.messages.route import RouteReply


class Lost(Unavailable):
    """The instance that worked on an attempt is gone (`is_crash`), hangs, drains, or gave it up."""

    def __init__(
        self,
        public_message: str,
        instance: str,
        *,
        is_crash: bool,
        is_hang: bool = False,
        is_drain: bool = False,
    ) -> None:
        super().__init__(public_message, reason="instance")
        self.instance = instance
        self.is_crash = is_crash
        self.is_hang = is_hang
        self.is_drain = is_drain


@dataclass(slots=True)
class Piece:
    """Tokens taken together: int32 LE bytes, their logprobs if asked for, the end if it came."""

    token_ids: bytes
    logprobs: tuple[TokenLogprob, ...] | None
    end: EndInfo | None


@dataclass(slots=True)
class Choice:
    """One completion. `num_received` tokens came without a gap; `granted` is its credit's end.

    `token_ids`: all of those, int32 LE. `num_cached`: prompt tokens that the attempt that began it
    found cached. `is_placed`: part of this attempt; `is_heard`: a row of this attempt came.
    """

    index: int
    token_ids: bytearray = field(default_factory=bytearray)
    num_received: int = 0
    num_taken: int = 0
    granted: int = 0
    waiting: list[Piece] = field(default_factory=list)
    end: EndInfo | None = None
    num_cached: int | None = None
    is_resuming: bool = False
    is_placed: bool = False
    is_heard: bool = False


class Generation:
    """The gateway's state of one `GenerationSpec`.

    `notify` is set whenever there is something to take, or it is over. `error` set: it failed.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        *,
        block_hashes: bytes,
        deadline: Deadline,
        notify: asyncio.Event,
        is_eager: bool = True,
    ) -> None:
        """`is_eager` False: the consumer is woken for ends and for credit only."""
        self.spec = spec
        self.block_hashes = block_hashes
        self.deadline = deadline
        self.notify = notify
        self.is_eager = is_eager
        self.attempt = 0
        self.placement: RouteReply | None = None
        # Instances that failed it since it last got on; those of them that will not come back.
        self.excluded: tuple[str, ...] = ()
        self.gone: tuple[str, ...] = ()
        # The instance that failed the attempt, as it was told; empty: none did.
        self.blamed: str | None = None
        # Called when an attempt fails while it is being placed.
        self.interrupt: Callable[[], None] | None = None
        self.is_accepted = False
        self.error: ServingError | None = None
        self.is_over = False
        self.over = asyncio.Event()
        self.choices = [Choice(c.index, granted=spec.credit_tokens) for c in spec.choices]
        # Has this attempt brought a token or an end yet; how many before it did not.
        self.has_tokens = False
        self.num_barren = 0
        self.last_row_s = 0.0
        # Wall clock of the first row, for spans and metrics; 0 before.
        self.first_row_ns = 0
        self._num_open = len(self.choices)
        self._failure: ServingError | None = None
        self._attempt_over = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    # -- attempts

    def begin(self, attempt: int) -> None:
        """The choices that are open go on behind what came of them."""
        self.attempt = attempt
        self.placement = None
        self.is_accepted = False
        self.num_barren = 0 if self.has_tokens or attempt == 1 else self.num_barren + 1
        self.has_tokens = False
        for choice in self.choices:
            choice.is_placed = choice.is_heard = choice.is_resuming = False
        self.blamed = None
        self._failure = None
        if self._num_open:
            self._attempt_over.clear()

    def place_open(self) -> tuple[ChoiceSpec, ...]:
        """The choices to place now, with what came of them; credit counts from there."""
        placed = []
        for choice, spec in zip(self.choices, self.spec.choices, strict=True):
            if choice.end is None:
                choice.is_placed = True
                choice.granted = choice.num_received + self.spec.credit_tokens
                placed.append(replace(spec, token_ids=bytes(choice.token_ids)))
        return tuple(placed)

    @property
    def has_strays(self) -> bool:
        """Has a choice ended here of which its instance may not have known yet."""
        return any(c.is_placed and c.end is not None and not c.is_heard for c in self.choices)

    async def wait_attempt(self) -> None:
        """Return when every choice has ended; raise what the attempt failed with."""
        await self._attempt_over.wait()
        if self._failure is not None:
            raise self._failure

    def lose(self, error: ServingError, blamed: str | None = None) -> None:
        """The attempt has failed (an instance is lost, a prompt could not be computed)."""
        if self._failure is None and self._num_open:
            self._failure = error
            self.blamed = blamed
            self._attempt_over.set()
            if self.interrupt is not None:
                self.interrupt()

    def conclude(self, error: ServingError | None) -> None:
        """It is over, once."""
        if not self.is_over:
            self.is_over = True
            self.error = error
            self.over.set()
            self.notify.set()

    @property
    def is_complete(self) -> bool:
        """Has every choice of the attempt ended."""
        return self._num_open == 0

    @property
    def num_tokens(self) -> int:
        """Tokens received so far, all choices together."""
        return sum(choice.num_received for choice in self.choices)

    # -- rows, as they come

    def accept(self, row: TokenRow) -> Choice | None:
        """Take a row in. Returns the choice that lacks tokens if there is a gap before the row."""
        if not 0 <= row.choice < len(self.choices):
            return None
        choice = self.choices[row.choice]
        choice.is_heard = True
        if choice.end is not None:
            return None
        ahead = row.offset - choice.num_received
        if ahead > 0:
            return choice
        num_new = len(row.token_ids) // 4 + ahead
        if num_new < 0 or (num_new == 0 and row.end is None):
            return None
        self.last_row_s = monotonic_s()
        is_failed = row.end is not None and row.end.finish_reason in ("error", "cancelled")
        end = None if is_failed else row.end
        if num_new or end is not None:
            self._take_in(choice, row, ahead, end)
        if row.end is not None and is_failed:
            self.lose(_failure_of(row.end), row.end.error_instance)
        elif end is not None:
            self._close(choice, end)
            self.notify.set()
        elif self.is_eager or choice.num_received + self.spec.credit_tokens // 2 >= choice.granted:
            self.notify.set()
        return None

    def _take_in(self, choice: Choice, row: TokenRow, ahead: int, end: EndInfo | None) -> None:
        """Keep what is new in a row that begins `-ahead` tokens before what lacks."""
        if not self.first_row_ns:
            self.first_row_ns = time.time_ns()
        self.has_tokens = True
        if choice.num_cached is None:
            choice.num_cached = row.num_cached_tokens
        token_ids = row.token_ids[-4 * ahead :]
        logprobs = (
            None if row.logprobs is None else row.logprobs[-ahead:] if ahead else row.logprobs
        )
        choice.waiting.append(Piece(token_ids, logprobs, end))
        choice.token_ids += token_ids
        choice.num_received += len(token_ids) // 4

    def finish(self, choice: Choice, end: EndInfo) -> bool:
        """The consumer ends a choice (a stop string). False if it had ended already."""
        if choice.end is not None:
            return False
        choice.waiting.clear()
        self._close(choice, end)
        return True

    def _close(self, choice: Choice, end: EndInfo) -> None:
        choice.end = end
        self._num_open -= 1
        if self._num_open == 0:
            self._attempt_over.set()
            if self.interrupt is not None:
                self.interrupt()

    # -- the consumer

    def take(self, choice: Choice) -> Piece | None:
        """Everything of a choice that waits, as one piece; None if there is nothing."""
        waiting = choice.waiting
        if not waiting:
            return None
        choice.waiting = []
        piece = waiting[0] if len(waiting) == 1 else _joined(waiting)
        choice.num_taken += len(piece.token_ids) // 4
        return piece

    def needs_grant(self, choice: Choice) -> bool:
        """Has half of a choice's credit been used up."""
        return choice.num_taken + self.spec.credit_tokens // 2 >= choice.granted

    def extend_credit(self, choice: Choice) -> int:
        """The new end of a choice's credit: what was taken, and a whole credit more."""
        choice.granted = choice.num_taken + self.spec.credit_tokens
        return choice.granted


def _joined(pieces: Sequence[Piece]) -> Piece:
    logprobs = None
    if pieces[0].logprobs is not None:
        logprobs = tuple(entry for piece in pieces for entry in piece.logprobs or ())
    return Piece(b"".join(piece.token_ids for piece in pieces), logprobs, pieces[-1].end)


def _failure_of(end: EndInfo) -> ServingError:
    if end.error_reason == "draining":
        return Lost(end.error_message, end.error_instance, is_crash=False, is_drain=True)
    if end.finish_reason == "cancelled":
        return Unavailable(end.error_message or "the engine gave the request up", reason="engine")
    if not end.error_code:
        return InvariantViolated("the engine failed")
    return from_code(end.error_code, end.error_message or "the engine failed")
