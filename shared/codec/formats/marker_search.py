"""Markers in text that comes in pieces: the first of them, and what may still become one."""

import re
from collections.abc import Sequence
from typing import Final

# Blanks before a marker that may belong to it.
MAX_BLANKS: Final = 64


def begun_at_end(text: str, marker: str) -> int:
    """How many characters at the end of `text` are the beginning of `marker`, but not all of it."""
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)


class MarkerSearch:
    """Looks for markers in text that comes in pieces."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = re.compile("|".join(map(re.escape, markers))) if markers else None
        self._longest = max(map(len, markers), default=0)
        prefixes = sorted(
            {marker[:size] for marker in markers for size in range(1, len(marker))},
            key=len,
            reverse=True,
        )
        blanks = rf"\s{{0,{MAX_BLANKS}}}"
        begun = f"(?:{'|'.join(map(re.escape, prefixes))})?" if prefixes else ""
        self._tail = re.compile(rf"{blanks}{begun}\Z")
        self._last_blanks = re.compile(rf"{blanks}\Z")

    def find(self, text: str) -> tuple[int, str] | None:
        """The first marker and where it is."""
        found = self._markers.search(text) if self._markers else None
        return (found.start(), found[0]) if found else None

    def held_from(self, text: str) -> int:
        """From where on the text may be a marker's beginning, or blanks that belong to one."""
        if self._markers is None:
            return len(text)
        found = self._tail.search(text, max(0, len(text) - MAX_BLANKS - self._longest))
        return found.start() if found else len(text)

    def edge(self, text: str, start: int) -> int:
        """Where the blanks before a marker at `start` begin."""
        found = self._last_blanks.search(text[:start], max(0, start - MAX_BLANKS))
        return found.start() if found else start
