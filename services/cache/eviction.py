"""Which kept block goes first. Pure.

batch before chat before agent; in a class the longest unused; of one use the end of a prefix
before its beginning, as blocks behind a gap are found by nobody.
"""

import heapq
from typing import Final

from finback.services.cache.slots import SlotKey
from finback.shared.lanes.arena_format import SlotHeader, TrafficClass

Rank = tuple[int, float, int]  # class, last use in seconds, minus the place in the prompt

_SLACK: Final = 64


class EvictionQueue:
    """Slots by rank, lowest first; a slot's rank may change. Each step is O(log n)."""

    def __init__(self) -> None:
        self._ranks: dict[SlotKey, Rank] = {}
        self._heap: list[tuple[Rank, SlotKey]] = []  # stale entries are skipped

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: SlotKey) -> bool:
        return key in self._ranks

    def push(self, key: SlotKey, rank: Rank) -> None:
        """Take in a slot, or change its rank."""
        if self._ranks.get(key) == rank:
            return
        self._ranks[key] = rank
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 2 * len(self._ranks) + _SLACK:
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def discard(self, key: SlotKey) -> None:
        """Take out a slot, if it is in."""
        self._ranks.pop(key, None)

    def rank(self, key: SlotKey) -> Rank | None:
        """The rank of a slot that is in."""
        return self._ranks.get(key)

    def first(self) -> tuple[Rank, SlotKey] | None:
        """The lowest rank and its slot; it stays in."""
        while self._heap:
            rank, key = self._heap[0]
            if self._ranks.get(key) == rank:
                return rank, key
            heapq.heappop(self._heap)
        return None


def rank_of(header: SlotHeader, used_s: float) -> Rank:
    """The rank of a kept slot that was last used at `used_s` (monotonic)."""
    if header.label is None:
        return TrafficClass.BATCH, used_s, 0
    return header.label.traffic_class, used_s, -header.label.block_index
