"""Stop strings over a stream of text, with exact hold-back.

The result does not depend on how the text was cut into pushes: the match is the one that ends
first; of several that end there, the longest. Text is held back only while it could still become
the beginning of a match.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """`text` may be shown. `matched` is the stop string that ended it, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Scans one completion for its stop strings; the match and all after it are not shown."""

    __slots__ = ("_first", "_held", "_max_hold", "_prefixes", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        # Longest first: of several matches with one end, the first found starts earliest.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._prefixes = {stop[:end] for stop in self._stops for end in range(1, len(stop))}
        self._first = {stop[0] for stop in self._stops}
        self._max_hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Scan more text; after a match the matcher must not be used again."""
        buffer = self._held + text
        found = self._earliest_end(buffer)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopScan(buffer[:start], stop)
        cut = self._hold_from(buffer)
        self._held = buffer[cut:]
        return StopScan(buffer[:cut])

    def finish(self) -> str:
        """The held text: the completion ended without a match."""
        held, self._held = self._held, ""
        return held

    def _earliest_end(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            limit = len(buffer) if best is None else best[0]
            start = buffer.find(stop, 0, limit)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _hold_from(self, buffer: str) -> int:
        for cut in range(max(0, len(buffer) - self._max_hold), len(buffer)):
            if buffer[cut] in self._first and buffer[cut:] in self._prefixes:
                return cut
        return len(buffer)
