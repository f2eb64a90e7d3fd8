"""Which blocks an operator's `evict` gives up, and in which order. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from finback.services.cache.arena_book import ArenaBook
from finback.services.cache.eviction import Rank
from finback.services.cache.kept import KeptBlocks
from finback.services.cache.slots import SlotKey
from finback.shared.lanes.arena_format import SlotState, TrafficClass


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictChoice:
    """Blocks up to a class; of one tenant (digest) only; unused since `before_s` (monotonic) only."""

    highest: TrafficClass = TrafficClass.AGENT
    tenant: bytes | None = None
    before_s: float | None = None

    def keys(self, book: ArenaBook, kept: KeptBlocks) -> list[SlotKey]:
        """Those that may go now, in the order in which they would."""
        return [key for _, key in sorted(self._ranked(book, kept))]

    def _ranked(self, book: ArenaBook, kept: KeptBlocks) -> Iterator[tuple[Rank, SlotKey]]:
        keys = (
            [key for _, key in book.index.items()]
            if self.tenant is None
            else book.index.tenant(self.tenant)
        )
        for key in keys:
            rank = self.rank(key, book, kept)
            if rank is not None:
                yield rank, key

    def rank(self, key: SlotKey, book: ArenaBook, kept: KeptBlocks) -> Rank | None:
        """The block's rank; None if it is not meant, or may not go (any more)."""
        if not book.has(key) or book.header(key).state is not SlotState.KEPT:
            return None
        header = book.header(key)
        if header.label is None or (self.tenant not in (None, header.label.tenant)):
            return None
        rank = kept.rank(key, header)
        if rank is None or rank[0] > self.highest:
            return None
        is_old = self.before_s is None or kept.used_s(key) <= self.before_s
        return rank if is_old else None
