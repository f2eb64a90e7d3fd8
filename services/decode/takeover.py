"""Taking a prompt over from prefill: blocks are copied by ticket, checked, put into the pool.

A block that does not arrive whole is a miss: decode computes it, and all after it, itself. Full blocks
may come as the cache keeps them, with their tokens behind the KV; these are compared.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

from finback.services.decode.table import Request
from finback.shared.engine.from_wire import num_known_tokens
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv.stored_block import geometry_of, kv_of, payload_bytes
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.decode import HandoffRequest

# Blocks copied at a time: bounds the host memory that a hand-over takes.
_MAX_PARALLEL: Final = 4


class BlockReceiver:
    """Copies the blocks of tickets into the engine's pool."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        spec = host.engine.cache_spec
        self._geometry = geometry_of(spec)
        self._stored_bytes = payload_bytes(self._geometry)
        self._slots = asyncio.Semaphore(_MAX_PARALLEL)

    async def receive(self, request: Request, handoff: HandoffRequest) -> tuple[int, ...]:
        """Copy all blocks of a hand-over; returns the indices of those that could not be had."""
        attributes = {
            tracing.REQUEST_ID: handoff.request_id,
            "finback.num_blocks": len(handoff.tickets),
            "finback.num_tokens": handoff.num_tokens,
        }
        with tracing.span("handoff", attributes) as span:
            indexed = list(enumerate(handoff.tickets, start=handoff.first_block))
            # Past a block that is missing nothing is of use: decode computes from there on.
            wanted = [(i, t) for i, t in indexed if not _is_lost(request, i)]
            results = await asyncio.gather(
                *(self._receive_one(request, index, ticket) for index, ticket in wanted)
            )
            missing = tuple(index for index, is_there in results if not is_there)
            span.set_attribute("finback.num_missing", len(missing))
            span.set_attribute("finback.lane", handoff.tickets[0].kind if indexed else "none")
        return missing

    async def receive_states(self, request: Request, handoff: HandoffRequest) -> None:
        """Copy the state at the prompt's end, and where others begin; the engine can do without."""
        states = self._host.engine.states
        if states is None:
            return
        key = _first_key(request)
        if handoff.state is not None:
            most = states.payload_bytes_at(handoff.num_tokens)
            await self._receive_state(handoff.state, most, partial(states.give, key))
        if handoff.snapshot is not None:
            keep = partial(states.take_snapshot, key)
            await self._receive_state(handoff.snapshot, states.payload_bytes, keep)

    async def _receive_state(
        self, ticket: Ticket, num_bytes: int, keep: Callable[[bytes], object]
    ) -> None:
        try:
            if ticket.length != num_bytes:
                raise CorruptData("length", f"{ticket.length} bytes of state")
            keep(bytes(await self._host.lanes.get(ticket)))
        except CorruptData as error:
            self._host.metrics.count("finback.decode.states_missed", reason=error.reason)
        except InvalidRequest as error:
            self._host.metrics.count("finback.decode.states_missed", reason="misfit")
            self._host.log.warning("state refused", error=error.public_message)
        else:
            self._host.metrics.count("finback.decode.states_taken", lane=ticket.kind)

    async def _receive_one(self, request: Request, index: int, ticket: Ticket) -> tuple[int, bool]:
        async with self._slots:
            try:
                data = await self._fetch(request, index, ticket)
            except CorruptData as error:
                self._host.metrics.count("finback.decode.blocks_missed", reason=error.reason)
                self._host.peer_lanes.missed(request.prefill_instance, ticket.kind, error.reason)
                return index, False
            await self._host.engine.import_block(_first_key(request), index, data)
        self._host.peer_lanes.took(request.prefill_instance, ticket.kind)
        self._host.metrics.count("finback.decode.blocks_taken", lane=ticket.kind)
        return index, True

    async def _fetch(self, request: Request, index: int, ticket: Ticket) -> memoryview:
        block_size = self._geometry.block_size
        num_known = num_known_tokens(request.spec, request.prompt)
        num_tokens = min(block_size, num_known - 1 - index * block_size)
        if num_tokens == block_size and ticket.length == self._stored_bytes:
            return self._kv_of(request, index, await self._host.lanes.get(ticket))
        if num_tokens < 1 or ticket.length != self._geometry.num_bytes(num_tokens):
            raise CorruptData("length", f"{ticket.length} bytes for {num_tokens} tokens")
        return await self._host.lanes.get(ticket)

    def _kv_of(self, request: Request, index: int, payload: memoryview) -> memoryview:
        width = 4 * self._geometry.block_size
        start, end = index * width, (index + 1) * width
        known = request.prompt
        if end > len(known):
            known += request.spec.choices[0].token_ids
        try:
            return kv_of(payload, self._geometry, known[start:end])
        except ValueError as error:
            raise CorruptData("tokens", str(error)) from error


def _first_key(request: Request) -> tuple[str, int]:
    if not request.choices:
        raise NotFound("the request has no choices")
    return (request.request_id, min(request.choices))


def _is_lost(request: Request, index: int) -> bool:
    return request.first_missing is not None and index >= request.first_missing
