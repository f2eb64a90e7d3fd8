"""A `KeyValue` inside one process, for unit tests: same contract as the JetStream one."""

import asyncio
from collections.abc import Callable

from finback.shared.actor.kv import Entry, WrongRevision
from finback.shared.clock import monotonic_s

_BEAT_S = 0.05


class MemoryKV:
    """Share one object between those who should see each other's keys."""

    def __init__(self, *, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._entries: dict[str, tuple[Entry, float]] = {}
        self._watches: list[MemoryWatch] = []
        self._revision = 0

    async def open(self) -> None:
        return

    async def put(self, key: str, value: bytes, *, expected: int | None = None) -> int:
        found = await self.get(key)
        if expected is not None and expected != (found.revision if found else 0):
            raise WrongRevision(key)
        return self._set(key, value)

    async def get(self, key: str) -> Entry | None:
        found = self._entries.get(key)
        if found is None:
            return None
        entry, written_s = found
        if entry.value is not None and monotonic_s() - written_s > self._ttl_s:
            return Entry(key, None, self._set(key, None))
        return entry

    async def delete(self, key: str) -> None:
        self._set(key, None)

    async def watch(
        self, changed: Callable[[Entry], None], beat: Callable[[], None]
    ) -> "MemoryWatch":
        live = [entry for key in tuple(self._entries) if (entry := await self.get(key))]
        watch = MemoryWatch(self._watches, changed, beat, _BEAT_S)
        for entry in live:
            changed(entry)
        return watch

    def _set(self, key: str, value: bytes | None) -> int:
        self._revision += 1
        entry = Entry(key, value, self._revision)
        self._entries[key] = (entry, monotonic_s())
        for watch in tuple(self._watches):
            watch.changed(entry)
        return self._revision


class MemoryWatch:
    """See `Watch`."""

    def __init__(
        self,
        among: "list[MemoryWatch]",
        changed: Callable[[Entry], None],
        beat: Callable[[], None],
        every_s: float,
    ) -> None:
        self.num_pending = 0
        self.changed = changed
        self._among = among
        among.append(self)
        self._beats = asyncio.ensure_future(self._beat(beat, every_s))

    async def _beat(self, beat: Callable[[], None], every_s: float) -> None:
        while True:
            beat()
            await asyncio.sleep(every_s)

    async def stop(self) -> None:
        self._beats.cancel()
        if self in self._among:
            self._among.remove(self)
