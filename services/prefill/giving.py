"""Gives finished blocks away: into the arena where there is one, else over lane `nats`."""

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import anyio

from finback.services.prefill.job import Job
from finback.services.prefill.split import Split, tokens_in_block
from finback.shared.clock import monotonic_s
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import ServingError
from finback.shared.kv.layout import BlockGeometry
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
        spec = host.engine.cache_spec
        self._geometry = BlockGeometry(
            block_size=spec.block_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            kv_dtype=spec.kv_dtype,
        )
        self._quiet_until_s = 0.0
        self._quiet_s = _QUIET_S
        self._nats_slots = anyio.Semaphore(_MAX_NATS)

    async def give(self, job: Job, split: Split, first: int, end: int, lane: str) -> Given:
        """Tickets for blocks from `first` on, at least one and at most up to `end`.

        `lane` is what decode can read. A cache that is full or away is no failure: the blocks take
        lane `nats`.
        """
        end = min(end, first + MAX_BLOCKS)
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
        return await self._by_nats(job, split, first, end)

    def _failed(self, why: str) -> None:
        self._quiet_until_s = monotonic_s() + self._quiet_s
        self._quiet_s = min(_MAX_QUIET_S, self._quiet_s * 2)
        self._host.metrics.count("finback.prefill.arena_failures")
        self._host.log.warning("arena failed, using lane nats", error=why)

    def _length(self, split: Split, index: int) -> int:
        num_tokens = tokens_in_block(index, split, self._geometry.block_size)
        return self._geometry.num_bytes(num_tokens)

    # -- lane shm

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

    # -- lane nats

    async def _by_nats(self, job: Job, split: Split, first: int, end: int) -> Given:
        await self._nats_slots.acquire()
        tickets: list[Ticket] = []

        async def release() -> None:
            self._nats_slots.release()
            for ticket in tickets:
                await self._host.nats_lane.release(ticket)

        try:
            for index in range(first, end):
                data = bytearray(self._length(split, index))
                with anyio.CancelScope(shield=True):
                    await self._host.engine.export_block(job.key, index, memoryview(data))
                tickets.append(await self._host.nats_lane.put(data))
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(ServingError):
                await release()
            raise
        return Given(tickets=tuple(tickets), release=release)
