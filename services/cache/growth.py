"""New extents are made in a worker thread, so that nobody else waits for the kernel to clear pages.

Whoever is about to take slots asks for room first. What is taken without asking, by blocks that come
from files, still grows the arena on the spot: by one extent at a time.
"""

import time

import anyio
from anyio import to_thread

from finback.services.cache.arena import Arena
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics


class Growth:
    """Grows one arena, one extent at a time."""

    def __init__(self, arena: Arena, metrics: Metrics) -> None:
        self._arena = arena
        self._metrics = metrics
        self._lock = anyio.Lock()

    async def make_room(self, slot_bytes: int, num_slots: int, *, is_brief: bool = False) -> None:
        """Extents until so many slots of that size are free, or the arena may not grow."""
        room = self._arena.room
        if room.missing(slot_bytes, num_slots, is_brief=is_brief) <= 0:
            return
        async with self._lock:
            while (missing := room.missing(slot_bytes, num_slots, is_brief=is_brief)) > 0:
                if not await self._grow(slot_bytes, missing):
                    return

    async def _grow(self, slot_bytes: int, num_slots: int) -> bool:
        files, started = self._arena.files, time.perf_counter()
        with (
            tracing.span("cache grow arena") as span,
            files.claim(slot_bytes, num_slots) as max_bytes,
        ):
            made = await to_thread.run_sync(files.make, slot_bytes, max_bytes)
            span.set_attribute("finback.bytes", made.header.file_bytes if made else 0)
        if made is None:
            return False
        self._arena.room.add(made)
        self._metrics.observe("finback.cache.grow_duration", time.perf_counter() - started)
        return True
