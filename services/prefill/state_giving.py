"""Gives the state at a prompt's end away: through the arena where there is one, else by files
that both hosts see or over lane `nats`.

State that cannot be given is no failure: decode makes it anew from the blocks.
"""

import contextlib

import anyio

from finback.services.prefill.giving import Given
from finback.services.prefill.job import Job
from finback.shared.engine.state_port import StatePort
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import NotFound, ServingError
from finback.shared.lanes.ticket import Ticket


class StateGiver:
    """Turns the state of a complete prompt into a ticket."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def give(self, job: Job, lane: str) -> Given | None:
        """One ticket, or None for a model without state. `lane` is what decode can read."""
        states = self._host.engine.states
        return await self._give(job, lane, None if states is None else self._payload(states, job))

    async def give_snapshot(self, job: Job, lane: str) -> Given | None:
        """Where the other choices begin; None if there are none, or nothing was kept."""
        states = self._host.engine.states
        if states is None or len(job.spec.choices) < 2:
            return None
        return await self._give(job, lane, states.export_snapshot(job.key))

    async def _give(self, job: Job, lane: str, payload: bytes | None) -> Given | None:
        if payload is None:
            return None
        try:
            given = await self._by_arena(job, payload) if lane == "shm" else None
            return given or await self._by_peer_lane(payload, lane)
        except ServingError as error:
            self._host.log.warning("state not given", error=error.public_message)
            return None

    def _payload(self, states: StatePort, job: Job) -> bytes | None:
        with contextlib.suppress(NotFound):  # the sequence has ended: the hand-over will fail too
            found = states.export(job.key)
            return None if found is None else found[1]
        return None

    async def _by_arena(self, job: Job, payload: bytes) -> Given | None:
        if not await self._host.has_arena():
            return None
        arena = self._host.arena
        try:
            lease = await arena.reserve(job.spec.request_id, 1, len(payload))
            if not lease.slots:
                return None
            tickets: tuple[Ticket, ...] = ()
            try:
                with arena.writer.view(lease.slots[0]) as view:
                    view[: len(payload)] = payload
                written = [(lease.slots[0], len(payload))]
                tickets = await arena.commit(lease, written, job.spec.request_id)
            finally:
                if not tickets:
                    with anyio.CancelScope(shield=True):
                        await arena.release(lease.lease_id)
        except (OSError, ValueError, ServingError):  # no arena, or it was made anew: the other lane
            self._host.metrics.count("finback.prefill.arena_failures")
            return None
        return Given(tickets=tickets, release=lambda: arena.release(lease.lease_id))

    async def _by_peer_lane(self, payload: bytes, lane: str) -> Given:
        ticket = await self._host.peer_lanes.put(lane, payload)
        return Given(tickets=(ticket,), release=lambda: self._host.lanes.release(ticket))
