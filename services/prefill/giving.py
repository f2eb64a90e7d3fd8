"""Gives finished blocks away: full ones through the cache's store, under their hash, so that they are
written once and kept; others into the arena under a lease; without an arena over lane `nats`.
"""

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import anyio

from finback.services.prefill.job import Job
from finback.services.prefill.keeping import BlockKeeper
from finback.services.prefill.split import Split, tokens_in_block
from finback.shared.clock import monotonic_s
from finback.shared.engine.from_wire import store_terms
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import ServingError
from finback.shared.kv.stored_block import geometry_of
from finback.shared.lanes.session import SlotLease
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import Slot

# Blocks a message: bounds what a hand-over holds of the arena, and how late its first block is.
MAX_BLOCKS: Final = 8
# After a cache failed it is left alone this long, twice as long each time; lane `nats` serves.
_QUIET_S: Final = 1.0
_MAX_QUIET_S: Final = 16.0
# Hand-overs over lane `nats` at a time: each keeps a copy of its blocks.
_MAX_NATS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Tickets of consecutive blocks, and how to take them back."""

    tickets: tuple[Ticket, ...]
    release: Callable[[], Coroutine[Any, Any, None]]


class BlockGiver:
    """Turns blocks of the engine into tickets."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._keeper = BlockKeeper(host)
        self._geometry = geometry_of(host.engine.cache_spec)
        self._quiet_until_s = 0.0
        self._quiet_s = _QUIET_S
        self._nats_slots = anyio.Semaphore(_MAX_NATS)

    async def give(self, job: Job, split: Split, first: int, end: int, lane: str) -> Given:
        """Tickets for blocks from `first` on, at least one and at most up to `end`.

        `lane` is what decode can read. A cache that is full or away is no failure: the blocks take
        lane `nats`.
        """
        end = min(end, first + MAX_BLOCKS)
        num_full = split.num_tokens // self._geometry.block_size
        if lane == "shm" and first < num_full and self._keeper.wants(job):
            given = await self._by_store(job, split, first, min(end, num_full), end)
            if given is not None:
                return given
        given = await self._not_kept(job, split, first, end, lane)
        if lane != "shm":
            self._keeper.keep_later(job, first, min(first + len(given.tickets), num_full))
        return given

    async def _not_kept(self, job: Job, split: Split, first: int, end: int, lane: str) -> Given:
        is_usable = lane == "shm" and monotonic_s() >= self._quiet_until_s
        if is_usable and await self._host.has_arena():
            try:
                given = await self._by_arena(job, split, first, end)
            except (OSError, ValueError) as error:  # the arena was made anew, or is gone
                self._failed(str(error))
            except ServingError as error:
                self._failed(error.public_message)
            else:
                self._quiet_s = _QUIET_S
                if given is not None:
                    return given
                self._host.metrics.count("finback.prefill.arena_full")
        return await self._by_peer_lane(job, split, first, end, lane)

    def _failed(self, why: str) -> None:
        self._quiet_until_s = monotonic_s() + self._quiet_s
        self._quiet_s = min(_MAX_QUIET_S, self._quiet_s * 2)
        self._host.cache.failed(why)  # or the next question waits for the same silence again
        self._host.metrics.count("finback.prefill.arena_failures")
        self._host.log.warning("arena failed, using lane nats", error=why)

    def _length(self, split: Split, index: int) -> int:
        num_tokens = tokens_in_block(index, split, self._geometry.block_size)
        return self._geometry.num_bytes(num_tokens)

    # -- lane shm

    async def _by_store(
        self, job: Job, split: Split, first: int, end: int, last: int
    ) -> Given | None:
        """Full blocks up to `end`, and what follows up to `last` with them; None if none is kept."""
        cache = self._host.cache
        lease = cache.open_lease(store_terms(job.spec))
        rest: Given | None = None
        try:
            tickets = await self._keeper.give(job, first, end, lease)
            if first + len(tickets) == end < last:
                rest = await self._not_kept(job, split, end, last, "shm")
                tickets += rest.tickets
        except (OSError, ValueError, ServingError) as error:  # the arena was made anew, or is gone
            cache.failed(f"write: {error}")
            tickets = ()
        except BaseException:
            await cache.release(lease)
            raise
        if not tickets:
            await cache.release(lease)
            return None

        async def release() -> None:
            await cache.release(lease)
            if rest is not None:
                await rest.release()

        return Given(tickets=tickets, release=release)

    async def _by_arena(self, job: Job, split: Split, first: int, end: int) -> Given | None:
        arena = self._host.arena
        lease = await arena.reserve(job.spec.request_id, end - first, self._geometry.block_bytes)
        if not lease.slots:
            return None
        try:
            tickets = await self._fill(job, split, first, lease)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await arena.release(lease.lease_id)
            raise
        return Given(tickets=tickets, release=lambda: arena.release(lease.lease_id))

    async def _fill(
        self, job: Job, split: Split, first: int, lease: SlotLease
    ) -> tuple[Ticket, ...]:
        written = [
            (slot, self._length(split, index))
            for index, slot in enumerate(lease.slots, start=first)
        ]
        # Never left half-way: the device thread would write into slots that are not ours any more.
        with anyio.CancelScope(shield=True):
            failures: list[Exception] = []
            async with anyio.create_task_group() as group:
                for index, (slot, length) in enumerate(written, start=first):
                    group.start_soon(self._export, job, index, slot, length, failures)
        if failures:
            raise failures[0]
        return await self._host.arena.commit(lease, written, job.spec.request_id)

    async def _export(
        self, job: Job, index: int, slot: Slot, length: int, failures: list[Exception]
    ) -> None:
        try:
            with self._host.arena.writer.view(slot) as view, view[:length] as part:
                await self._host.engine.export_block(job.key, index, part)
        except (ServingError, OSError, ValueError) as error:
            failures.append(error)

    # -- lanes file and nats

    async def _by_peer_lane(self, job: Job, split: Split, first: int, end: int, lane: str) -> Given:
        await self._nats_slots.acquire()
        tickets: list[Ticket] = []

        async def release() -> None:
            self._nats_slots.release()
            for ticket in tickets:
                await self._host.lanes.release(ticket)

        try:
            for index in range(first, end):
                data = bytearray(self._length(split, index))
                with anyio.CancelScope(shield=True):
                    await self._host.engine.export_block(job.key, index, memoryview(data))
                tickets.append(await self._host.peer_lanes.put(lane, data))
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(ServingError):
                await release()
            raise
        return Given(tickets=tuple(tickets), release=release)
