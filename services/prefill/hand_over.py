"""The way of one prompt: reserve at decode, compute, hand finished blocks over while computing."""

import dataclasses
from collections import defaultdict
from collections.abc import Awaitable
from typing import Final, TypeVar

import anyio

from finback.services.prefill.giving import BlockGiver, Given
from finback.services.prefill.job import Job
from finback.services.prefill.split import Split, ready_blocks, split_prompt
from finback.services.prefill.state_giving import StateGiver
from finback.shared.engine.from_wire import (
    known_tokens,
    num_known_tokens,
    refusal,
    sequence_spec,
    store_terms,
)
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.token_chunks import split_token_ids
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import DeadlineExceeded, NotFound, Overloaded, Unavailable
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.decode import (
    HandoffReply,
    HandoffRequest,
    ReserveReply,
    ReserveRequest,
)
from finback.shared.wire.messages.prefill import TokenChunk

T = TypeVar("T")

_RESERVE_TIMEOUT_S: Final = 10.0
_HANDOFF_TIMEOUT_S: Final = 30.0
# The reason of a refusal that passes as soon as another sequence ends.
_FULL: Final = "no_blocks"
_FULL_RETRY_S: Final = 0.05


@dataclasses.dataclass(slots=True, kw_only=True)
class _States:
    """What goes with the last blocks of a model with state."""

    state: Given | None = None
    snapshot: Given | None = None


def _ticket(given: Given | None) -> Ticket | None:
    return None if given is None else given.tickets[0]


class HandOver:
    """Runs jobs against the engine and a decode instance."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._giver = BlockGiver(host)
        self._state_giver = StateGiver(host)
        self._block_size = host.engine.cache_spec.block_size
        self._turns: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)

    async def run(self, job: Job) -> None:
        """Return once decode has all of the prompt; raises `ServingError` when that cannot be."""
        reserved = await self._reserve_in_turn(job)
        num_known = num_known_tokens(job.spec, job.prompt)
        sequence = sequence_spec(
            job.spec,
            job.spec.choices[0],
            job.prompt,
            "prefill",
            drafting=False,
            trace=job.parent,
        )
        # What prefill itself has cached is only known on admission, so ask for that first.
        at_decode = job.request.decode_computes_tokens
        split = split_prompt(num_known, reserved.num_cached_tokens, 0, self._block_size, at_decode)
        if not split.is_empty:
            admission = self._host.engine.add(sequence, await self._bring_prefix(job))
            if not admission.accepted:
                raise refusal(admission)
            job.is_in_engine, job.sequence = True, sequence
            job.num_cached = admission.num_cached_tokens
            split = split_prompt(
                num_known, reserved.num_cached_tokens, job.num_cached, self._block_size, at_decode
            )
        if split.is_empty:
            num_tokens = min(reserved.num_cached_tokens, split.num_tokens)
            await self._send(job, None, split.num_blocks, num_tokens, is_last=True)
            return
        job.split = split
        await self._give_blocks(job, split, reserved.lane)

    async def _bring_prefix(self, job: Job) -> PrefixHold | None:
        """What the cache has of the prompt, in the pool here: only the rest is computed."""
        tokens = known_tokens(job.spec.choices[0], job.prompt)
        salt = job.spec.cache_salt.encode()
        if not self._host.prefixes.may_help(tokens, salt):
            return None
        terms = store_terms(job.spec)
        return (await self._host.prefixes.fetch(tokens, salt, terms, job.parent)).hold

    async def _of_decode(self, job: Job, answer: Awaitable[T]) -> T:
        """Await decode's answer; when there is none, the gateway must look for another decode."""
        try:
            return await answer
        except Overloaded:
            job.blamed = job.request.decode_instance
            raise
        except (Unavailable, DeadlineExceeded, NotFound) as error:
            job.blamed = job.request.decode_instance
            raise Unavailable(error.public_message, reason=error.reason) from error

    async def _reserve_in_turn(self, job: Job) -> ReserveReply:
        """Reserve; while decode's pool is full, prompts wait here, first come first served.

        Their number is bounded by the role's queue, their time by the request's deadline.
        """
        turn = self._turns[job.request.decode_instance]
        if not turn.locked():
            try:
                return await self._of_decode(job, self._reserve(job))
            except Overloaded as error:
                if error.reason != _FULL:
                    raise
        async with turn:
            while True:
                try:
                    return await self._of_decode(job, self._reserve(job))
                except Overloaded as error:
                    if error.reason != _FULL:
                        raise
                await anyio.sleep(_FULL_RETRY_S)

    async def _reserve(self, job: Job) -> ReserveReply:
        request, subjects = job.request, self._host.subjects
        first, *rest = split_token_ids(job.prompt)
        timeout_s = min(_RESERVE_TIMEOUT_S, job.remaining_s())
        await self._host.has_arena()  # so that decode can tell whether it sees the same one
        # Pieces first: they are kept until the reservation asks for them.
        for index, piece in enumerate(rest, start=1):
            chunk = TokenChunk(
                request_id=job.spec.request_id,
                attempt=job.spec.attempt,
                index=index,
                token_ids=piece,
            )
            subject = subjects.instance("decode", request.decode_instance, "chunk")
            await self._host.client.publish(subject, chunk)
        spec = dataclasses.replace(
            job.spec, token_ids=first, timeout_ms=max(1, round(job.remaining_s() * 1000))
        )
        reply = await self._host.client.call(
            subjects.instance("decode", request.decode_instance, "reserve"),
            ReserveRequest(
                spec=spec,
                prefill_instance=self._host.instance,
                prefill_epoch=self._host.epoch,
                num_chunks=1 + len(rest),
                cache_instance=self._host.peer_lanes.cache_instance,
                file_address=self._host.peer_lanes.file_address,
            ),
            ReserveReply,
            timeout_s=timeout_s,
            request_id=job.spec.request_id,
            attempt=job.spec.attempt,
            epoch=request.decode_epoch,
        )
        return reply

    async def _give_blocks(self, job: Job, split: Split, lane: str) -> None:
        next_block = split.first_block
        while next_block < split.num_blocks:
            ready = ready_blocks(job.num_computed, split, self._block_size)
            if ready <= next_block:
                await job.progress.wait()
                continue
            given = await self._giver.give(job, split, next_block, ready, lane)
            states = _States()
            try:
                next_block += len(given.tickets)
                is_last = next_block == split.num_blocks
                covered = min(next_block * self._block_size, split.num_tokens)
                first = next_block - len(given.tickets)
                if is_last:
                    states.state = await self._state_giver.give(job, lane)
                    states.snapshot = await self._state_giver.give_snapshot(job, lane)
                reply = await self._send(job, given, first, covered, is_last=is_last, states=states)
            finally:
                for each in (given, states.state, states.snapshot):
                    if each is not None:
                        self._host.spawn(each.release)
            if reply.missing and not is_last:
                # Decode computes from the first missing block on: nothing of ours is of use to it.
                await self._send(job, None, next_block, covered, is_last=True)
                return

    async def _send(
        self,
        job: Job,
        given: Given | None,
        first_block: int,
        num_tokens: int,
        *,
        is_last: bool,
        states: "_States | None" = None,
    ) -> HandoffReply:
        tickets = () if given is None else given.tickets
        message = HandoffRequest(
            request_id=job.spec.request_id,
            attempt=job.spec.attempt,
            first_block=first_block,
            tickets=tickets,
            num_tokens=num_tokens,
            is_last=is_last,
            num_cached_tokens=job.num_cached,
            state=None if states is None else _ticket(states.state),
            snapshot=None if states is None else _ticket(states.snapshot),
        )
        attributes = {
            tracing.REQUEST_ID: job.spec.request_id,
            "finback.num_blocks": len(tickets),
            "finback.lane": tickets[0].kind if tickets else "none",
        }
        with tracing.span("handoff", attributes):
            return await self._of_decode(job, self._ask(job, message))

    async def _ask(self, job: Job, message: HandoffRequest) -> HandoffReply:
        """Hand over; asked once more when no answer came, which decode takes as the same."""
        subject = self._host.subjects.instance("decode", job.request.decode_instance, "handoff")
        for is_retry in (False, True):
            try:
                return await self._host.client.call(
                    subject,
                    message,
                    HandoffReply,
                    timeout_s=min(_HANDOFF_TIMEOUT_S, job.remaining_s()),
                    request_id=job.spec.request_id,
                    attempt=job.spec.attempt,
                    epoch=job.request.decode_epoch,
                )
            except DeadlineExceeded:
                if is_retry:
                    raise
        raise Unavailable("decode does not take the hand-over", reason="handoff")
