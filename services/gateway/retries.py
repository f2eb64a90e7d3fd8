"""Whether a request that lost its instance goes on elsewhere. Pure but for the budget that all share.

A request's attempts form chains: a chain begins with an attempt that brought something before it
failed (or with the first) and ends when another one does. See ADR 17.
"""

from dataclasses import dataclass
from typing import Final

from finback.services.gateway.generation import Lost
from finback.shared.errors import ServingError

MAX_CHAIN: Final = 3
# Whatever they bring: drains and give-ups beyond this are a cluster that cannot serve.
MAX_ATTEMPTS: Final = 32
MAX_CRASHES: Final = 2
# Two crashes further apart have as little to do with each other as with this request.
CRASH_WINDOW_S: Final = 60.0


class RetryBudget:
    """Retries may be a tenth of the requests, with room for one crash of a full instance."""

    BURST: Final = 256.0
    SHARE: Final = 0.1

    def __init__(self) -> None:
        self._left = self.BURST

    def earn(self) -> None:
        """A request came."""
        self._left = min(self.BURST, self._left + self.SHARE)

    def spend(self) -> bool:
        """May one more retry be made."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(slots=True)
class Retries:
    """The attempts of one request so far."""

    budget: RetryBudget
    num_attempts: int = 0
    num_in_chain: int = 0
    crashes_s: tuple[float, ...] = ()

    def begin(self) -> int:
        """The number of the attempt that begins now, from 1."""
        self.num_attempts += 1
        return self.num_attempts

    def failed(self, error: ServingError, *, has_progress: bool, now_s: float) -> bool:
        """Note how an attempt failed; True if another one may be made.

        `has_progress`: it brought a token or an end. An instance that drains is no failure.
        """
        if has_progress:
            self.num_in_chain = 0
        is_drain = isinstance(error, Lost) and error.is_drain
        self.num_in_chain += not is_drain
        if isinstance(error, Lost) and error.is_crash:
            self._note_crash(now_s)
        if not error.retryable or self.is_poison or self.num_attempts >= MAX_ATTEMPTS:
            return False
        if is_drain:
            return True
        return self.num_in_chain < MAX_CHAIN and self.budget.spend()

    def _note_crash(self, now_s: float) -> None:
        recent = tuple(at for at in self.crashes_s if now_s - at < CRASH_WINDOW_S)
        self.crashes_s = (*recent, now_s)

    @property
    def is_poison(self) -> bool:
        """It was there when two instances crashed: it may be what crashes them."""
        return len(self.crashes_s) >= MAX_CRASHES
