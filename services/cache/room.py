"""Making room in the arena: what is tried, in which order.

1. free slots of the size; 2. a new extent; 3. an idle extent of another size goes;
4. for what is only handed over: a larger free slot; 5. kept blocks are given up.
"""

from typing import Final

from finback.services.cache.arena_book import ArenaBook
from finback.services.cache.arena_files import ArenaFiles, Extent
from finback.services.cache.eviction import Rank
from finback.services.cache.kept import KeptBlocks
from finback.services.cache.slots import SlotKey
from finback.shared.lanes.arena_format import (
    BlockKind,
    ExtentHeader,
    SlotHeader,
    SlotState,
    TrafficClass,
)

# Each so many evictions it is asked whether blocks of another size are older.
_OTHERS_EVERY: Final = 32


class Room:
    """Room for slots of any size in the files of one arena."""

    def __init__(self, files: ArenaFiles, book: ArenaBook, kept: KeptBlocks) -> None:
        self._files = files
        self._book = book
        self._kept = kept
        self._num_evicted = 0

    def make(
        self,
        slot_bytes: int,
        num_slots: int,
        *,
        kind: BlockKind = BlockKind.BLOCK,
        max_class: TrafficClass = TrafficClass.AGENT,
        is_brief: bool = False,
    ) -> None:
        """Free `num_slots` slots of that size if that can be done.

        `is_brief`: they will soon be free again, so larger ones do. Blocks of `kind` up to
        `max_class` may be given up.
        """
        while (missing := self.missing(slot_bytes, num_slots, is_brief=is_brief)) > 0:
            if self._grow(slot_bytes, missing):
                continue
            if self._drop_idle(slot_bytes):
                continue
            if not self._evict(slot_bytes, kind, max_class, is_brief):
                return

    def missing(self, slot_bytes: int, num_slots: int, *, is_brief: bool = False) -> int:
        """How many slots of that size lack; 0 or less: none."""
        missing = num_slots - self._book.num_free(slot_bytes)
        if missing > 0 and is_brief:
            missing -= self._book.num_free_above(slot_bytes)
        return missing

    def _grow(self, slot_bytes: int, num_slots: int) -> bool:
        header = self._files.grow(slot_bytes, num_slots)
        if header is not None:
            self._adopt(header)
        return header is not None

    def add(self, extent: Extent) -> None:
        """Use an extent that was made elsewhere."""
        self._files.add(extent)
        self._adopt(extent.header)

    def _adopt(self, header: ExtentHeader) -> None:
        free = [SlotHeader()] * header.num_slots
        self._book.adopt(header.extent_id, header.slot_bytes, free, 0.0)

    def _drop_idle(self, slot_bytes: int) -> bool:
        idle = self._book.idle_extents(slot_bytes)
        if idle:
            self._drop(idle[0])
        return bool(idle)

    def _drop(self, extent_id: int) -> None:
        self._book.drop_extent(extent_id)
        self._files.drop(extent_id)

    def _evict(
        self, slot_bytes: int, kind: BlockKind, max_class: TrafficClass, is_brief: bool
    ) -> bool:
        sizes = {slot_bytes}
        if is_brief:
            sizes |= {size for size in self._book.extents().values() if size > slot_bytes}
        found = [v for size in sizes if (v := self._kept.victim(kind, size, max_class))]
        own = min(found) if found else None
        self._num_evicted += 1
        if own is None or (not is_brief and self._num_evicted % _OTHERS_EVERY == 0):
            other = self._other_extent(slot_bytes, max_class, own[0] if own else None)
            if other is not None:
                for key in self._book.keys_of(other):
                    if self._book.header(key).state is SlotState.KEPT:
                        self._book.drop(key, "evicted")
                self._drop(other)
                return True
        if own is None:
            return False
        self._book.drop(own[1], "evicted")
        return True

    def _other_extent(
        self, slot_bytes: int, max_class: TrafficClass, before: Rank | None
    ) -> int | None:
        """The extent of blocks of another size that were all unused for longest.

        None if there is none that may go, or none whose newest block is older than `before`.
        """
        oldest: tuple[Rank, int] | None = None
        for extent_id, size in self._book.extents().items():
            if size == slot_bytes:
                continue
            newest = self._newest(self._book.keys_of(extent_id))
            if newest is None or newest[0] > max_class or (before and newest >= before):
                continue
            if oldest is None or (newest, extent_id) < oldest:
                oldest = newest, extent_id
        return oldest[1] if oldest else None

    def _newest(self, keys: list[SlotKey]) -> Rank | None:
        ranks: list[Rank] = []
        for key in keys:
            header = self._book.header(key)
            if header.state is SlotState.FREE:
                continue
            rank = self._kept.rank(key, header) if header.state is SlotState.KEPT else None
            if rank is None or header.label is None or header.label.kind is not BlockKind.BLOCK:
                return None
            ranks.append(rank)
        return max(ranks, default=None)
