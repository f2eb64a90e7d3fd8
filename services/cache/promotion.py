"""Blocks on their way from the files into memory.

A few at a time, several blocks each, and each block once however many wait for it. The bytes are
read straight into the arena; a slot that a thread may still be writing is given to nobody else.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio

from finback.services.cache.block_names import tenant_digest
from finback.services.cache.file_tier import FileTier
from finback.services.cache.forgotten import Forgotten
from finback.services.cache.kept import Now
from finback.services.cache.retention import CLASSES
from finback.services.cache.slots import SlotKey, block_name
from finback.services.cache.store import KvStore
from finback.services.cache.transfers import FROM_FILES, note_transfer
from finback.shared.actor.service import Service
from finback.shared.errors import ServingError
from finback.shared.lanes.arena_format import BlockKind, BlockLabel, TrafficClass
from finback.shared.lanes.shm import ArenaWriter
from finback.shared.telemetry import tracing

if TYPE_CHECKING:
    from finback.services.cache.segments.reader import Outcome
    from finback.services.cache.segments.record import BlockRecord
    from finback.services.cache.segments.store import SegmentStore

MAX_JOBS: Final = 3  # that use the disk at once
BATCH: Final = 8  # blocks of a job
MAX_LOADING: Final = 1024  # blocks on their way, those in line included
READ_S: Final = 30.0

_LASTING: Final = frozenset({"corrupt", "expired"})  # causes of a miss that a later read is told
_Name = tuple[str, bytes]


@dataclass(slots=True)
class Load:
    """One block on its way. `reason`: why it did not come, once `done` is set."""

    done: anyio.Event = field(default_factory=anyio.Event)
    reason: str = ""


class Promotion:
    """Brings blocks from the file tier into the arena."""

    def __init__(
        self, service: Service, store: KvStore, tier: FileTier, forgotten: Forgotten
    ) -> None:
        self._service = service
        self.forgotten = forgotten
        self._store = store
        self._tier = tier
        self._writer = ArenaWriter(store.arena.folder)
        self._loading: dict[_Name, Load] = {}
        self._jobs = anyio.Semaphore(MAX_JOBS)
        self._is_closed = False

    def close(self) -> None:
        """Begin nothing more."""
        self._is_closed = True
        self._writer.close()

    @property
    def num_loading(self) -> int:
        """Blocks on their way."""
        return len(self._loading)

    def want(self, salt: str, hashes: Sequence[bytes], now: Now) -> Load | None:
        """Begin to bring the run of these blocks; the first one's load, None if it will not come."""
        first = self._loading.get((salt, hashes[0]))
        todo: list[bytes] = []
        for digest in hashes:
            if (salt, digest) in self._loading or self._store.is_held(salt, digest, now):
                continue
            if not self._tier.holds(salt, digest):
                break
            if self._is_closed or len(self._loading) >= MAX_LOADING:
                self._service.metrics.count("finback.cache.promotions", outcome="too_many")
                break
            self._loading[salt, digest] = Load()
            todo.append(digest)
        for start in range(0, len(todo), BATCH):
            self._service.spawn(self._job, salt, todo[start : start + BATCH])
        return first or self._loading.get((salt, hashes[0]))

    async def _job(self, salt: str, hashes: list[bytes]) -> None:
        """A child of the span of whoever wanted these blocks first."""
        with tracing.span("cache promote", {"finback.num_blocks": len(hashes)}) as span:
            reasons = await self._load(salt, hashes)
            span.set_attribute("finback.num_promoted", list(reasons.values()).count(""))
            span.set_attribute("finback.cache.miss", next(filter(None, reasons.values()), ""))

    async def _load(self, salt: str, hashes: list[bytes]) -> dict[bytes, str]:
        reasons = dict.fromkeys(hashes, "slow")
        try:
            async with self._jobs:
                reasons.update(await self._bring(salt, hashes))
        finally:
            for digest in hashes:
                load = self._loading.pop((salt, digest))
                load.reason = reasons[digest]
                if load.reason in _LASTING:
                    name = block_name(salt, digest)
                    self._store.arena.kept.note_gone(name, load.reason)
                load.done.set()
            self._count(list(reasons.values()))
        return reasons

    def _count(self, reasons: list[str]) -> None:
        for reason in reasons:
            self._service.metrics.count("finback.cache.promotions", outcome=reason or "done")

    async def _bring(self, salt: str, hashes: list[bytes]) -> dict[bytes, str]:
        """Why each block did not come; empty for those that did."""
        mark = self.forgotten.begin()
        try:
            return await self._bring_since(mark, salt, hashes)
        finally:
            self.forgotten.end(mark)

    async def _bring_since(self, mark: int, salt: str, hashes: list[bytes]) -> dict[bytes, str]:
        records = await self._tier.call(lambda store: store.find(salt, hashes))
        if records is None:
            return dict.fromkeys(hashes, "slow")
        found = [record for record in records if record is not None]
        self._tier.gone(salt, sorted(set(hashes) - {record.hash for record in found}))
        reasons = dict.fromkeys(hashes, "absent")
        reasons.update(dict.fromkeys((record.hash for record in found), "busy"))
        now = self._store.clocks.now()
        labels = [_label(record, now) for record in found]
        labels = [label for label in labels if not self.forgotten.is_label_void(mark, label)]
        if not labels or self._is_closed:
            return reasons
        lease_id = secrets.token_hex(16)
        slots = self._reserve(lease_id, labels, max(record.length for record in found), now)
        job = _Job(self, lease_id, slots, [r for r in found if r.hash in slots])
        if job.records:
            reasons.update(await job.run(self._tier))
        return reasons

    def _reserve(
        self, lease_id: str, labels: list[BlockLabel], num_bytes: int, now: Now
    ) -> dict[bytes, SlotKey]:
        return self._store.reserve_known(
            lease_id,
            labels,
            num_bytes,
            owner=self._service.instance,
            owner_epoch=self._service.epoch,
            now=now,
        )

    def views(self, slots: dict[bytes, SlotKey], records: "list[BlockRecord]") -> list[memoryview]:
        """The arena's memory for each record."""
        arena = self._store.arena
        return [
            self._writer.view(arena.slot(slots[record.hash], record.length)) for record in records
        ]

    def finish(
        self,
        lease_id: str,
        slots: dict[bytes, SlotKey],
        outcomes: "Sequence[Outcome]",
        read_ns: tuple[int, int],
    ) -> dict[bytes, str]:
        """On the event loop, once no thread writes any more: keep what was read, free the rest."""
        from finback.services.cache.segments.record import BlockRecord

        good = [outcome for outcome in outcomes if isinstance(outcome, BlockRecord)]
        note_transfer(self._service.metrics, FROM_FILES, sum(r.length for r in good), read_ns)
        written = [(slots[record.hash], record.length, record.checksum) for record in good]
        try:
            if written and not self._is_closed:
                self._store.commit_known(lease_id, written, self._store.clocks.now())
        except ServingError:  # it took longer than the lease
            good = []
        finally:
            if not self._is_closed:
                self._store.arena.release((lease_id,))
        return {record.hash: "" for record in good}


class _Job:
    """One read of several blocks, in a worker thread that may outlive its deadline."""

    def __init__(
        self,
        promotion: Promotion,
        lease_id: str,
        slots: dict[bytes, SlotKey],
        records: "list[BlockRecord]",
    ) -> None:
        self._promotion = promotion
        self._lease_id = lease_id
        self._slots = slots
        self.records = records
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[dict[bytes, str]] = self._loop.create_future()
        self._lock = threading.Lock()
        self._is_claimed = False
        self._parent = tracing.current()
        self._read_ns = (0, 0)

    async def run(self, tier: FileTier) -> dict[bytes, str]:
        """Why blocks did not come; those that did are in memory and kept."""
        outcomes = await tier.call(self._read, timeout_s=READ_S)
        if self._claim():  # no thread has begun, and none will
            self._finish([])
        if outcomes is None:
            return dict.fromkeys(self._slots, "slow")
        from finback.services.cache.segments.record import Miss

        reasons = {
            record.hash: "corrupt" if outcome.reason in ("corrupt", "io") else outcome.reason
            for record, outcome in zip(self.records, outcomes, strict=True)
            if isinstance(outcome, Miss)
        }
        return {**reasons, **await self._finished}

    def _read(self, store: "SegmentStore") -> "list[Outcome]":
        outcomes: list[Outcome] = []
        if not self._claim():
            return outcomes
        try:
            salt, hashes = self.records[0].salt, [record.hash for record in self.records]
            views = self._promotion.views(self._slots, self.records)
            started = time.time_ns()
            outcomes = store.read_many(salt, hashes, views)
            self._read_ns = started, time.time_ns()
        finally:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._finish, outcomes)
        return outcomes

    def _claim(self) -> bool:
        """Whether the caller is the first: a thread that writes, or who frees the slots."""
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
            return is_first

    def _finish(self, outcomes: "Sequence[Outcome]") -> None:
        if self._read_ns[1]:
            attributes = {"finback.bytes": sum(record.length for record in self.records)}
            tracing.record_span("cache file read", *self._read_ns, self._parent, attributes)
        kept = self._promotion.finish(self._lease_id, self._slots, outcomes, self._read_ns)
        if not self._finished.done():
            self._finished.set_result(kept)


def _label(record: "BlockRecord", now: Now) -> BlockLabel:
    retention_s = 0
    if record.expires_unix_s:
        begun_s = record.used_unix_s or record.created_unix_s or now.wall_s
        retention_s = max(1, round(record.expires_unix_s - min(begun_s, now.wall_s)))
    tenant = record.tenant
    is_digest = len(tenant) == 32 and not tenant.strip("0123456789abcdef")
    return BlockLabel(
        salt=record.salt,
        hash=record.hash,
        kind=BlockKind.BLOCK,
        block_index=record.first_block,
        tenant=bytes.fromhex(tenant) if is_digest else tenant_digest(tenant),
        traffic_class=CLASSES.get(record.traffic_class, TrafficClass.CHAT),
        retention_s=min(retention_s, 2**32 - 1),
    )
