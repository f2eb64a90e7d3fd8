"""Blocks that are to be kept for days go into the files, in the background.

Bounded: when too many wait, a block just stays in memory. What is given up before its turn is lost.
"""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import anyio
from opentelemetry.context import Context

from finback.services.cache.file_tier import FileTier
from finback.services.cache.forgotten import Forgotten
from finback.services.cache.slots import SlotKey
from finback.services.cache.store import KvStore
from finback.services.cache.transfers import TO_FILES, note_transfer
from finback.services.cache.write_batch import WriteBatch
from finback.shared.actor.service import Service
from finback.shared.lanes.arena_format import BlockKind, SlotHeader, SlotState
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry import tracing

if TYPE_CHECKING:
    from finback.services.cache.segments.record import BlockRecord

MAX_WAITING: Final = 4096  # blocks
_BATCH: Final = 8
_REST_S: Final = 1.0


class WriteBack:
    """The queue of blocks to be written, and its one writer."""

    def __init__(
        self,
        service: Service,
        store: KvStore,
        tier: FileTier,
        reader: ArenaReader,
        forgotten: Forgotten,
    ) -> None:
        self._service = service
        self._store = store
        self._tier = tier
        self._reader = reader
        self._forgotten = forgotten
        self._waiting: deque[tuple[SlotKey, int, Context]] = deque()
        self._wake = anyio.Event()

    @property
    def num_waiting(self) -> int:
        """Blocks whose turn has not come."""
        return len(self._waiting)

    def offer(self, keys: Iterable[SlotKey]) -> None:
        """Blocks that were just committed; those worth it get in line."""
        if self._tier.health.state == "off":
            return
        parent = tracing.current()
        for key in keys:
            header = self._store.arena.book.header(key)
            if not self._is_wanted(header):
                continue
            if len(self._waiting) >= MAX_WAITING:
                self._count("dropped")
                continue
            self._waiting.append((key, header.generation, parent))
        self._wake.set()

    def _is_wanted(self, header: SlotHeader) -> bool:
        label = header.label
        return (
            label is not None
            and label.kind is BlockKind.BLOCK
            and (label.retention_s > 0 or header.is_pinned)
            and not self._tier.holds(label.salt, label.hash)
        )

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            if not self._waiting:
                self._wake = anyio.Event()
                await self._wake.wait()
            if not self._tier.is_usable:
                await anyio.sleep(_REST_S)
                continue
            await self._write_some()

    async def _write_some(self) -> None:
        num = min(_BATCH, len(self._waiting))
        jobs, parents = [], []
        for key, generation, parent in [self._waiting.popleft() for _ in range(num)]:
            job = self._job(key, generation)
            if job is not None:
                jobs.append(job)
                parents.append(parent)
        if not jobs:
            return
        with WriteBatch(jobs, self._reader, self._forgotten) as batch:
            outcomes = await self._tier.call(batch.write)
            for (ticket, record), outcome in zip(jobs, outcomes or (), strict=False):
                self._done(ticket, record, outcome, batch)
        if outcomes is None:
            self._count("failed", len(jobs))
            return
        written = [r.length * (o == "written") for (_, r), o in zip(jobs, outcomes, strict=True)]
        note_transfer(self._service.metrics, TO_FILES, sum(written), batch.span_ns)
        _record(parents, written, batch.span_ns)

    def _done(self, ticket: Ticket, record: "BlockRecord", outcome: str, batch: WriteBatch) -> None:
        if outcome == "written" and batch.is_void(record):
            outcome = "forgotten"
        self._count(outcome)
        if outcome == "corrupt":
            self._store.drop_corrupt(record.salt, record.hash, ticket.generation)
            self._service.log.warning("a block was damaged before it was written to files")

    def _count(self, outcome: str, number: int = 1) -> None:
        self._service.metrics.count("finback.cache.write_backs", number, outcome=outcome)

    def _job(self, key: SlotKey, generation: int) -> "tuple[Ticket, BlockRecord] | None":
        book = self._store.arena.book
        if not book.has(key):
            return None
        header = book.header(key)
        label = header.label
        if header.state is not SlotState.KEPT or header.generation != generation or label is None:
            self._count("given_up")
            return None
        from finback.services.cache.segments.record import BlockRecord

        record = BlockRecord(
            salt=label.salt,
            hash=label.hash,
            length=header.length,
            checksum=header.checksum,
            expires_unix_s=header.expiry_s,
            tenant=label.tenant.hex(),
            traffic_class=label.traffic_class.name.lower(),
            created_unix_s=self._store.clocks.now().wall_s,
            used_unix_s=header.used_s,
            first_block=label.block_index,
        )
        return self._store.arena.ticket(key), record


def _record(parents: list[Context], written: list[int], span_ns: tuple[int, int]) -> None:
    """A span for each request that had stored blocks of the batch; none without a request."""
    if not tracing.is_recording():
        return
    sizes: dict[int, list[int]] = {}
    for parent, num_bytes in zip(parents, written, strict=True):
        sizes.setdefault(tracing.span_id(parent), []).append(num_bytes)
    by_id = {tracing.span_id(parent): parent for parent in parents}
    for span_id, parent in by_id.items():
        if span_id:
            mine = sizes[span_id]
            attributes = {"finback.num_blocks": len(mine), "finback.bytes": sum(mine)}
            tracing.record_span("cache file write", *span_ns, parent, attributes)
