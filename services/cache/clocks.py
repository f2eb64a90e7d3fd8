"""The two clocks of a cache: one for leases, and one for retention that does not follow jumps at once.

Both tiers doubt a wall clock that jumps by the same rule (`retention_clock`): a wrong time that is
set right within the hour costs no block.
"""

from collections.abc import Callable
from typing import Any

from finback.services.cache.kept import Now
from finback.services.cache.segments import retention_clock
from finback.shared.clock import monotonic_s, unix_s
from finback.shared.telemetry.logging import get_logger


class Clocks:
    """Read once an operation. Only from the event loop."""

    def __init__(
        self,
        *,
        now: Callable[[], float] = unix_s,
        monotonic: Callable[[], float] = monotonic_s,
        log: Any = None,
    ) -> None:
        self._now = now
        self._monotonic = monotonic
        self._log = log or get_logger(__name__)
        self._state = retention_clock.start(now(), monotonic(), None)

    def now(self) -> Now:
        """The monotonic time, and the wall-clock time that is believed."""
        mono_s = self._monotonic()
        was_in_doubt = self._state.doubt_s is not None
        self._state = retention_clock.advance(self._state, self._now(), mono_s)
        if self._state.doubt_s is not None and not was_in_doubt:
            self._log.warning(
                "the wall clock jumped; blocks expire by the old time for an hour",
                lead_s=round(self._state.doubt_s),
            )
        return Now(mono_s, self._state.unix_s)
