"""Keeps blocks that were computed here in the cache of this host, behind the steps.

Blocks wait by name only: one that the pool evicts before its turn is dropped. The device thread copies
one at a time into a buffer, so that at most one short copy lies between two steps; from there another
thread writes it into its arena slot. A sequence's neighbours go in one batch.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from anyio import to_thread

from finback.shared.engine.prefix_port import NewBlock
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.errors import ServingError
from finback.shared.kv.cache_client import CacheClient, CacheLease, StoreTerms
from finback.shared.kv.forget_scope import ForgetScope
from finback.shared.kv.stored_block import geometry_of, payload_bytes
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.cache import Slot
from finback.shared.wire.messages.cache_store import StoreReply

if TYPE_CHECKING:
    from finback.shared.engine.engine import Engine  # brings torch; the caller built it

MAX_QUEUE: Final = 4096
"""Blocks that wait; each is a name of some hundred bytes."""
MAX_BATCH: Final = 16
FORGET_S: Final = 10.0
_POLL_S: Final = 0.01


def terms_of(spec: SequenceSpec) -> StoreTerms:
    """For whom a sequence's blocks are kept."""
    return StoreTerms(
        request_id=spec.key[0],
        attempt=spec.attempt,
        tenant=spec.tenant,
        traffic_class=spec.traffic_class,
        retention_s=spec.retention_s,
    )


class WriteBack:
    """`offer` is called while steps are committed; `run` stores what was offered."""

    def __init__(self, engine: "Engine", cache: CacheClient, metrics: Metrics) -> None:
        self._prefixes = engine.prefixes
        self._cache = cache
        self._metrics = metrics
        self._payload_bytes = payload_bytes(geometry_of(engine.cache_spec))
        self._payload = memoryview(bytearray(self._payload_bytes))
        self._queue: deque[NewBlock] = deque()
        self._news = asyncio.Event()
        self._is_storing = False
        self._num_batches = 0

    @property
    def num_waiting(self) -> int:
        """Blocks that are not stored yet."""
        return len(self._queue) + self._is_storing

    def offer(self, block: NewBlock) -> None:
        """A block that was computed here. What prefill computes goes with its hand-over."""
        if block.spec.mode != "prefill":
            self.put(block)

    def put(self, block: NewBlock) -> None:
        """A block to keep, if its request wants that."""
        if not terms_of(block.spec).wants_store:
            return
        if len(self._queue) >= MAX_QUEUE:
            self._count("queue_full")
            return
        self._queue.append(block)
        self._news.set()

    async def forget(self, scope: ForgetScope) -> None:
        """What waits and is to be forgotten is not stored; what is being stored now has been.

        TimeoutError: that took longer than the cache may.
        """
        kept = [b for b in self._queue if not scope.covers(b.hash, b.spec.cache_salt)]
        self._count("forgotten", len(self._queue) - len(kept))
        self._queue = deque(kept)
        batch = self._num_batches
        async with asyncio.timeout(FORGET_S):
            while self._is_storing and self._num_batches == batch:  # noqa: ASYNC110  # seldom
                await asyncio.sleep(_POLL_S)

    async def run(self) -> None:
        """Store what is offered; runs until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._queue:
                batch = self._next_batch()
                self._is_storing = True
                self._num_batches += 1
                try:
                    await self._store(batch)
                finally:
                    self._is_storing = False

    def _next_batch(self) -> list[NewBlock]:
        """The oldest block, and those of its sequence that follow it."""
        batch = [self._queue.popleft()]
        while self._queue and len(batch) < MAX_BATCH:
            block, last = self._queue[0], batch[-1]
            if block.spec is not last.spec or block.index != last.index + 1:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _store(self, batch: list[NewBlock]) -> None:
        if not self._cache.is_there:
            self._count("no_cache", len(batch))
            return
        spec = batch[0].spec
        attributes = {
            tracing.REQUEST_ID: spec.key[0],
            "finback.choice": spec.key[1],
            "finback.first_block": batch[0].index,
            "finback.num_blocks": len(batch),
        }
        with tracing.span("cache store", attributes, parent=spec.trace) as span:
            async with self._cache.lease(terms_of(spec)) as lease:
                num_stored = await self._write(batch, lease)
            span.set_attribute("finback.num_stored", num_stored)
            span.set_attribute("finback.bytes", num_stored * self._payload_bytes)

    async def _write(self, batch: list[NewBlock], lease: CacheLease) -> int:
        reply = await lease.store(
            [block.hash for block in batch],
            first_block=batch[0].index,
            payload_bytes=self._payload_bytes,
        )
        if reply is None:
            self._count("failed", len(batch))
            return 0
        self._count("known", len(batch) - len(reply.slots))
        tickets = await self._fill(batch, reply)
        slots = reply.slots[: len(tickets)]
        written = [(s, t) for s, t in zip(slots, tickets, strict=True) if t is not None]
        if not written or not await lease.commit_tickets(written):
            self._count("failed", len(written))
            return 0
        self._count("stored", len(written))
        return len(written)

    async def _fill(self, batch: list[NewBlock], reply: StoreReply) -> list[Ticket | None]:
        """A ticket for each slot that was written; None for a block that the pool gave up."""
        tickets: list[Ticket | None] = []
        for slot, index in zip(reply.slots, reply.indexes, strict=True):
            try:
                is_there = await self._prefixes.copy_out(batch[index].hash, self._payload)
                tickets.append(await self._write_slot(slot) if is_there else None)
            except (ServingError, OSError, ValueError) as error:
                self._cache.failed(f"write: {error}")
                break
        self._count("evicted", tickets.count(None))
        return tickets

    async def _write_slot(self, slot: Slot) -> Ticket:
        """On a thread: pages of the arena that nobody used yet take long to be had."""
        return await to_thread.run_sync(self._cache.session.writer.write, slot, self._payload)

    def _count(self, outcome: str, number: int = 1) -> None:
        if number:
            self._metrics.count("finback.worker.blocks_kept", number, outcome=outcome)
