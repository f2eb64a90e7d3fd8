"""Stop strings that count only where what stands before them may be the whole answer.

Of an answer that is kept to a grammar that is the grammar's to say, so a match is in doubt until
somebody decides. Nothing is shown meanwhile; what was no stop is text like any other.
"""

from collections.abc import Sequence
from typing import Final

from finback.shared.codec.stop_strings import StopMatcher, StopScan

_NOWHERE: Final = (0, -1)


class DoubtfulStops(StopMatcher):
    """As `StopMatcher`, but a match waits in `doubt` for `decide`.

    Matches are tried in the order in which they end; of several that end together, the longest first.
    """

    __slots__ = ("_floor", "_is_closed", "_match")

    def __init__(self, stops: Sequence[str]) -> None:
        super().__init__(stops)
        self._match: tuple[int, int, str] | None = None  # end, start, stop string
        # Matches up to this (end, start) are decided.
        self._floor = _NOWHERE
        self._is_closed = False

    @property
    def doubt(self) -> str | None:
        """What came from the beginning of the match in doubt on; None: there is none."""
        return None if self._match is None else self._held[self._match[1] :]

    def push(self, text: str) -> StopScan:
        """Scan more text. While a match is in doubt, text only waits behind it."""
        if self._match is not None:
            self._held += text
            return StopScan("")
        # Every match within what was held has been decided.
        self._floor = (len(self._held), len(self._held))
        self._held += text
        return self._next()

    def decide(self, is_stop: bool) -> StopScan:
        """Settle the match in doubt; the next one may be in doubt then."""
        if self._match is None:
            raise ValueError("no stop string is in doubt")
        end, start, stop = self._match
        self._match = None
        if is_stop:
            shown, self._held = self._held[:start], ""
            return StopScan(shown, stop)
        self._floor = (end, start)
        return self._next()

    def close(self) -> None:
        """The answer has ended by itself: from now on all text is shown."""
        self._is_closed = True

    def _next(self) -> StopScan:
        self._match = None if self._is_closed else self._first_above(self._floor)
        if self._match is not None:
            return StopScan("")
        cut = len(self._held) if self._is_closed else self._hold_from(self._held)
        shown, self._held = self._held[:cut], self._held[cut:]
        return StopScan(shown)

    def _first_above(self, floor: tuple[int, int]) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, floor[0] - len(stop)))
            while start >= 0 and (start + len(stop), start) <= floor:
                start = self._held.find(stop, start + 1)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best
