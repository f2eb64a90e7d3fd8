"""Hands full blocks over through the cache's store: each is written once, under its hash.

Blocks that the cache has already are not copied at all, decode gets their tickets. What the cache
does not want, or is just getting from somebody else, is left to the caller.
"""

from typing import Final

import anyio

from finback.services.prefill.job import Job
from finback.shared.engine.from_wire import known_tokens, store_terms
from finback.shared.engine.prefix_port import NewBlock
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import ServingError
from finback.shared.kv.cache_client import CacheLease
from finback.shared.kv.stored_block import geometry_of, payload_bytes, write_tokens
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.cache import Slot

_NO_WAIT_MS: Final = 100
"""Files are not waited for: prefill has the blocks."""


class BlockKeeper:
    """Stores blocks of a prompt while it is handed over."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._geometry = geometry_of(host.engine.cache_spec)
        self._payload_bytes = payload_bytes(self._geometry)

    def wants(self, job: Job) -> bool:
        """May this prompt's blocks be kept, and is there a cache?"""
        is_usable = self._host.cache.is_there and self._host.engine.prefixes.is_enabled
        return is_usable and store_terms(job.spec).wants_store

    async def give(self, job: Job, first: int, end: int, lease: CacheLease) -> tuple[Ticket, ...]:
        """Tickets of the full blocks `first`, ... that could be kept, fewer than up to `end` or none.

        They hold as long as `lease`, which the caller releases.
        """
        hashes = self._names(job)[first:end]
        attributes = {
            tracing.REQUEST_ID: job.spec.request_id,
            "finback.first_block": first,
            "finback.num_blocks": len(hashes),
        }
        with tracing.span("cache store", attributes, parent=job.parent) as span:
            tickets = await self._store(job, first, hashes, lease)
            span.set_attribute("finback.num_stored", len(tickets))
            await self._find(hashes, tickets, lease)
        run: list[Ticket] = []
        while len(run) in tickets:
            run.append(tickets[len(run)])
        return tuple(run)

    def keep_later(self, job: Job, first: int, end: int) -> None:
        """Decode is on another host; the blocks are kept on this one all the same, behind the steps."""
        if job.sequence is not None and self.wants(job):
            for index, name in enumerate(self._names(job)[first:end], start=first):
                block = NewBlock(hash=name, index=index, spec=job.sequence)
                self._host.write_back.put(block)

    def _names(self, job: Job) -> tuple[bytes, ...]:
        if not job.hashes:
            tokens = known_tokens(job.spec.choices[0], job.prompt)
            salt = job.spec.cache_salt.encode()
            job.hashes = self._host.engine.prefixes.chain(tokens, salt)
        return job.hashes

    async def _store(
        self, job: Job, first: int, hashes: tuple[bytes, ...], lease: CacheLease
    ) -> dict[int, Ticket]:
        reply = await lease.store(
            hashes,
            first_block=first,
            payload_bytes=self._payload_bytes,
            prompt_blocks=len(job.hashes),
        )
        if reply is None or not reply.slots:
            return {}
        # Never left half-way: the device thread would write into slots that are not ours any more.
        with anyio.CancelScope(shield=True):
            failures: list[Exception] = []
            async with anyio.create_task_group() as group:
                for slot, index in zip(reply.slots, reply.indexes, strict=True):
                    group.start_soon(self._write, job, first + index, slot, failures)
        if failures:
            raise failures[0]
        tickets = await lease.commit([(slot, self._payload_bytes) for slot in reply.slots])
        if tickets is None:
            return {}
        self._host.metrics.count("finback.worker.blocks_kept", len(tickets), outcome="stored")
        return dict(zip(reply.indexes, tickets, strict=True))

    async def _write(self, job: Job, index: int, slot: Slot, failures: list[Exception]) -> None:
        tokens = tokens_of_block(job, index, self._geometry.block_size)
        try:
            with (
                self._host.cache.session.writer.view(slot) as view,
                view[: self._payload_bytes] as payload,
                view[: self._geometry.block_bytes] as kv,
            ):
                write_tokens(payload, self._geometry, tokens)
                await self._host.engine.export_block(job.key, index, kv)
        except (ServingError, OSError, ValueError) as error:
            failures.append(error)

    async def _find(
        self, hashes: tuple[bytes, ...], tickets: dict[int, Ticket], lease: CacheLease
    ) -> None:
        """Add the tickets of blocks that the cache had already."""
        known = [at for at in range(len(hashes)) if at not in tickets]
        if known:
            reply = await lease.read([hashes[at] for at in known], _NO_WAIT_MS)
            if reply is not None:
                tickets.update(zip(known, reply.tickets, strict=False))


def tokens_of_block(job: Job, index: int, block_size: int) -> bytes:
    """The ids of a full block of what is known, int32 LE."""
    start, end = 4 * block_size * index, 4 * block_size * (index + 1)
    known = job.prompt
    if end > len(known):
        known += job.spec.choices[0].token_ids
    return known[start:end]
