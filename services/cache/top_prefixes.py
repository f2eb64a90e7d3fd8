"""Which prefixes are read most. Bounded: the rarest makes room for a new one. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_PREFIXES: Final = 512


@dataclass(slots=True)
class PrefixCount:
    """Reads that began with one block, and the longest run in one read."""

    num_reads: int
    num_blocks: int


class TopPrefixes:
    """Counts by (salt, first hash), as the space-saving sketch (Metwally et al., 2005) does.

    A newcomer takes over the count of whom it drives out: counts are upper bounds, and whatever is
    read more often than one time in `limit` is in the list.
    """

    def __init__(self, limit: int = MAX_PREFIXES) -> None:
        self._limit = limit
        self._counts: dict[tuple[str, bytes], PrefixCount] = {}

    def add(self, salt: str, digest: bytes, num_blocks: int) -> None:
        """One read of `num_blocks` that began with this block."""
        found = self._counts.get((salt, digest))
        if found is None:
            num_reads = 0
            if len(self._counts) >= self._limit:
                rarest = min(self._counts, key=lambda name: self._counts[name].num_reads)
                num_reads = self._counts.pop(rarest).num_reads
            found = self._counts[salt, digest] = PrefixCount(num_reads, 0)
        found.num_reads += 1
        found.num_blocks = max(found.num_blocks, num_blocks)

    def forget(self, is_forgotten: Callable[[str, bytes], bool]) -> None:
        """Let go of what is to be forgotten."""
        for name in [name for name in self._counts if is_forgotten(*name)]:
            del self._counts[name]

    def top(self, limit: int) -> list[tuple[str, bytes, PrefixCount]]:
        """The most read ones first."""
        items = sorted(self._counts.items(), key=lambda item: -item[1].num_reads)
        return [(salt, digest, count) for (salt, digest), count in items[:limit]]
