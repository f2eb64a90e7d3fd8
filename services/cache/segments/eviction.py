"""Making room: which blocks go, in batches, by the order of `policy`."""

from collections.abc import Callable, Sequence
from typing import Final

from finback.services.cache.segments.policy import CLASSES, Room, class_order, expire_limit
from finback.services.cache.segments.policy import spare_bytes as spare
from finback.services.cache.segments.record import Entry
from finback.services.cache.segments.state import State

_BATCH: Final = 64
_MOST_INLINE: Final = 1024  # blocks that one put may evict
# Where dead records give no room back before they are compacted, this much of the quota is live.
_MOST_LIVE: Final = 0.8


class Eviction:
    """Erases blocks. Every method needs `writing` and may raise OSError."""

    def __init__(self, state: State) -> None:
        self._state = state

    def room(self) -> Room:
        """How full the disk is by the quota."""
        options = self._state.options
        return Room(
            taken_bytes=self._state.run(lambda: self._state.table.taken_bytes()),
            max_bytes=options.max_bytes,
            spare_bytes=spare(options.max_bytes, options.segment_bytes),
        )

    def make_room(self, num_bytes: int, traffic_class: str, tenant: str) -> bool:
        """Room for a record, at the cost of classes that go no later than its own."""
        return self._fit_tenant(num_bytes, tenant) and self._fit(num_bytes, traffic_class)

    def _fit(self, num_bytes: int, traffic_class: str) -> bool:
        for _ in range(_MOST_INLINE // _BATCH):
            excess = self.room().excess(num_bytes)
            if not excess:
                return True
            if not self._state.disk.can_punch:
                return False  # only the sweep's compaction gives room back
            batch = self._next(self._classes(traffic_class), excess)
            if not batch or not self._state.erase(batch, "quota"):
                return False
        return not self.room().excess(num_bytes)

    def _fit_tenant(self, num_bytes: int, tenant: str) -> bool:
        most = self._state.options.tenant_bytes
        if not most:
            return True
        if num_bytes > most:
            return False
        for _ in range(_MOST_INLINE // _BATCH):
            excess = self._tenant_bytes(tenant) + num_bytes - most
            if excess <= 0:
                return True
            found = self._state.run(lambda: self._state.index.oldest_of_tenant(tenant, _BATCH))
            batch = _enough(found, excess)
            if not batch or not self._state.erase(batch, "tenant_quota"):
                return False
        return self._tenant_bytes(tenant) + num_bytes <= most

    def expire(self, now_unix_s: float) -> int:
        """Let go of blocks whose time is over, a bounded number."""
        usage = self._state.index.usage.total()
        left = expire_limit(usage.num_blocks)
        num_gone = 0
        while left > 0:
            limit = min(_BATCH, left)
            batch = self._run(lambda: self._state.index.expired(now_unix_s, limit))  # noqa: B023  # runs at once
            gone = self._state.erase(batch, "expired") if batch else 0
            num_gone += gone
            left -= limit
            if not gone:
                break
        return num_gone

    def fit_quota(self, most_blocks: int) -> int:
        """Evict until the spare room is free; returns how many blocks went."""
        num_gone = 0
        while num_gone < most_blocks:
            excess = self._sweep_excess()
            batch = self._next(self._classes(""), excess) if excess else []
            gone = self._state.erase(batch, "quota") if batch else 0
            num_gone += gone
            if not gone:
                break
        return num_gone

    def _sweep_excess(self) -> int:
        room = self.room()
        if self._state.disk.can_punch:
            return room.sweep_excess()
        live = self._state.index.usage.total().num_bytes
        return max(0, live - int(_MOST_LIVE * (room.max_bytes - room.spare_bytes)))

    def _next(self, classes: Sequence[str], excess: int) -> list[Entry]:
        for traffic_class in classes:
            found = self._run(lambda: self._state.index.oldest(traffic_class, _BATCH))  # noqa: B023  # runs at once
            if found:
                return _enough(found, excess)
        return []

    def _classes(self, traffic_class: str) -> list[str]:
        order = class_order(self._state.index.usage.by("traffic_class"))
        if traffic_class in CLASSES:
            return order[: order.index(traffic_class) + 1]
        return order

    def _tenant_bytes(self, tenant: str) -> int:
        usage = self._state.index.usage.by("tenant").get(tenant)
        return usage.num_bytes if usage else 0

    def _run(self, work: Callable[[], list[Entry]]) -> list[Entry]:
        return self._state.run(work)


def _enough(entries: Sequence[Entry], excess: int) -> list[Entry]:
    """The first of these that give so many bytes back."""
    batch: list[Entry] = []
    for entry in entries:
        if excess <= 0:
            break
        batch.append(entry)
        # A hole leaves the header page.
        excess -= max(1, entry.place.span - 4096)
    return batch
