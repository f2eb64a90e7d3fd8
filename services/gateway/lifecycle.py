"""Runs generations: route, place, watch, go on elsewhere, cancel. Every one ends exactly once.

Only the gateway retries. An attempt goes on behind the tokens that came before it, avoids the
instances that failed, and waits for others while none is there; how often, `retries.py` says.
"""

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace
from hashlib import blake2b
from typing import Final, TypeVar

from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation, Lost
from finback.services.gateway.retries import Retries, RetryBudget
from finback.shared.actor.deadline import Deadline
from finback.shared.clock import monotonic_s
from finback.shared.errors import (
    DeadlineExceeded,
    InvariantViolated,
    Overloaded,
    ServingError,
    Unavailable,
)
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.prefill import Ack, PrefillAccepted, PrefillRequest, TokenChunk
from finback.shared.wire.messages.route import RequestEnded, RouteReply, RouteRequest

T = TypeVar("T")

# How long the first instance of a request is waited for: a restarted one needs a few seconds.
ROUTE_WAIT_S: Final = 10.0
# And another one after a loss: late is better than never, for a stream that has begun above all.
REPLACE_WAIT_S: Final = 30.0
# Whom a request avoids it takes again after this long, if nobody else is there (and it is alive).
AVOID_S: Final = 2.0
PLACE_TIMEOUT_S: Final = 3.0
CHUNK_BYTES: Final = 256 * 1024
_PAUSE_S: Final = (0.01, 0.06)


class Lifecycle:
    """Drives each `Generation` to its end over the bus."""

    def __init__(self, desk: Desk, *, replace_wait_s: float = REPLACE_WAIT_S) -> None:
        """`replace_wait_s`: how long another instance is waited for after a loss."""
        self._replace_wait_s = replace_wait_s
        self._desk = desk
        self._client = desk.client
        self._subjects = desk.subjects
        self._budget = RetryBudget()

    async def run(self, generation: Generation) -> None:
        """Returns when it is over; how, is told by the generation itself."""
        self._budget.earn()
        self._desk.open[generation.request_id] = generation
        error: ServingError | None = Unavailable("the gateway stops", reason="stopping")
        try:
            async with asyncio.timeout(generation.deadline.remaining_s()):
                error = await self._attempts(generation)
        except TimeoutError:
            error = DeadlineExceeded("the request's time ran out", reason="timeout")
        finally:
            self._desk.open.pop(generation.request_id, None)
            generation.conclude(error)

    async def _attempts(self, generation: Generation) -> ServingError | None:
        retries, failed = Retries(self._budget), None
        while True:
            generation.begin(retries.begin())
            try:
                placement = await self._route(generation, failed)
            except ServingError as error:
                # That no other instance is there is no news to a client: why it needs one is.
                is_waited = failed is None or isinstance(failed, Unavailable)
                return error if is_waited or failed is None else _final(failed)
            try:
                await self._attempt(generation, placement)
            except ServingError as error:
                failed = error
            else:
                return None
            if generation.is_complete:  # what had come was enough
                return None
            has_progress = generation.has_tokens
            if not retries.failed(failed, has_progress=has_progress, now_s=monotonic_s()):
                return self._give_up(generation, retries, failed)
            self._note_retry(generation, placement, failed)
            await asyncio.sleep(random.uniform(*_PAUSE_S))

    def _give_up(
        self, generation: Generation, retries: Retries, error: ServingError
    ) -> ServingError:
        if not (error.retryable and retries.is_poison):
            return _final(error)
        digest = blake2b(generation.spec.token_ids, digest_size=16).hexdigest()
        self._desk.metrics.count("finback.gateway.poison")
        self._desk.log.error("poison", request_id=generation.request_id, prompt_hash=digest)
        return InvariantViolated("the request was present at two crashes of engines")

    async def _attempt(self, generation: Generation, placement: RouteReply) -> None:
        """Place and wait for the end; whatever else happens, the engines are told to stop."""
        generation.placement = placement
        self._desk.expect(placement.decode_instance)
        try:
            await _unless_lost(generation, self._place(generation, placement))
            generation.last_row_s = monotonic_s()
            generation.is_accepted = True
            generation.notify.set()
            await generation.wait_attempt()
        finally:
            if not generation.is_complete or generation.has_strays:
                self._desk.cancel_later(generation.request_id, generation.attempt, placement)
            await self._tell_ended(generation, placement)

    async def _route(self, generation: Generation, failed: ServingError | None) -> RouteReply:
        wait_s = self._route_wait_s(failed, has_begun=bool(generation.num_tokens))
        waiting = Deadline.after(min(wait_s, generation.deadline.remaining_s()))
        avoiding = Deadline.after(AVOID_S)
        with tracing.span("gateway route") as span:
            while True:
                avoided = generation.gone if avoiding.is_expired else generation.excluded
                try:
                    reply = await self._client.call(
                        self._subjects.service("router", "route"),
                        _route_request(generation, avoided),
                        RouteReply,
                        timeout_s=max(0.05, min(2.0, waiting.remaining_s())),
                        request_id=generation.request_id,
                        attempt=generation.attempt,
                    )
                except (Unavailable, DeadlineExceeded) as error:
                    if waiting.is_expired:
                        raise _no_instance(error) from error
                except Overloaded:
                    if waiting.is_expired or not generation.num_tokens:
                        raise
                else:
                    span.set_attribute("finback.route.reason", reply.reason)
                    span.set_attribute("finback.route.num_hit_tokens", reply.num_hit_tokens)
                    return reply
                await asyncio.sleep(random.uniform(*_PAUSE_S))

    def _route_wait_s(self, failed: ServingError | None, *, has_begun: bool) -> float:
        """How long to wait for an instance; one that is full or failing is not soon another one.

        An answer that has begun waits for room, too: its client cannot be told to come back later.
        """
        if failed is None:
            return ROUTE_WAIT_S
        if isinstance(failed, Unavailable) or (has_begun and isinstance(failed, Overloaded)):
            return self._replace_wait_s
        return 0.0

    async def _place(self, generation: Generation, placement: RouteReply) -> None:
        spec = generation.spec
        token_ids, left_s = spec.token_ids, generation.deadline.remaining_s()
        chunks = [token_ids[at : at + CHUNK_BYTES] for at in range(0, len(token_ids), CHUNK_BYTES)]
        request = PrefillRequest(
            spec=replace(
                spec,
                attempt=generation.attempt,
                token_ids=chunks[0],
                choices=generation.place_open(),
                timeout_ms=max(1, round(min(left_s, spec.timeout_ms / 1000 or left_s) * 1000)),
            ),
            decode_instance=placement.decode_instance,
            decode_epoch=placement.decode_epoch,
            num_chunks=len(chunks),
            decode_computes_tokens=placement.decode_computes_tokens,
        )
        try:
            await self._ask(generation, placement, "generate", request, PrefillAccepted)
            for index, chunk in enumerate(chunks[1:], 1):
                message = TokenChunk(
                    request_id=generation.request_id,
                    attempt=generation.attempt,
                    index=index,
                    token_ids=chunk,
                )
                await self._ask(generation, placement, "chunk", message, Ack)
        except DeadlineExceeded as error:
            instance = placement.prefill_instance
            text = f"{instance} does not answer"
            raise Lost(text, instance, is_crash=False, is_hang=True) from error

    async def _ask(
        self,
        generation: Generation,
        placement: RouteReply,
        verb: str,
        message: object,
        reply_type: type[T],
    ) -> T:
        return await self._client.call(
            self._subjects.instance("prefill", placement.prefill_instance, verb),
            message,
            reply_type,
            timeout_s=min(PLACE_TIMEOUT_S, max(0.05, generation.deadline.remaining_s())),
            request_id=generation.request_id,
            attempt=generation.attempt,
            epoch=placement.prefill_epoch,
        )

    def _note_retry(
        self, generation: Generation, placement: RouteReply, error: ServingError
    ) -> None:
        failed = error.instance if isinstance(error, Lost) else generation.blamed
        if failed is None:  # it was prefill that refused
            failed = placement.prefill_instance
        if generation.has_tokens:
            generation.excluded = generation.gone = ()
        generation.excluded += (failed,) if failed else ()
        if failed and isinstance(error, Lost) and (error.is_crash or error.is_drain):
            generation.gone += (failed,)
        self._desk.metrics.count("finback.gateway.retries", code=error.code)
        self._desk.log.warning(
            "retry",
            request_id=generation.request_id,
            attempt=generation.attempt,
            excluded=generation.excluded,
            num_tokens=generation.num_tokens,
            error=error.public_message,
        )

    async def _tell_ended(self, generation: Generation, placement: RouteReply) -> None:
        event = RequestEnded(
            request_id=generation.request_id,
            attempt=generation.attempt,
            decode_instance=placement.decode_instance,
            tenant=generation.spec.tenant,
            num_tokens=generation.num_tokens,
        )
        await self._desk.publish(self._subjects.event("gateway", "request-ended"), event)


async def _unless_lost(generation: Generation, placing: Awaitable[None]) -> None:
    """Place, but do not wait for the answer of an instance that is known to be dead."""
    try:
        async with asyncio.timeout(None) as waiting:
            generation.interrupt = lambda: waiting.reschedule(0.0)
            await placing
    except TimeoutError:
        await generation.wait_attempt()
    finally:
        generation.interrupt = None


def _route_request(generation: Generation, avoided: tuple[str, ...]) -> RouteRequest:
    spec = generation.spec
    known = [choice.num_received for choice in generation.choices if choice.end is None]
    return RouteRequest(
        request_id=spec.request_id,
        model=spec.model,
        num_prompt_tokens=len(spec.token_ids) // 4 + sum(known),
        max_tokens=spec.sampling.max_tokens - min(known, default=0),
        num_choices=max(1, len(known)),
        block_hashes=generation.block_hashes,
        tenant=spec.tenant,
        traffic_class=spec.traffic_class,
        attempt=generation.attempt,
        exclude=avoided,
        session=spec.session,
    )


def _no_instance(error: ServingError) -> Unavailable:
    return Unavailable(
        f"no instance can take the request: {error.public_message}",
        reason="no_instance",
        retry_after_s=error.retry_after_s or 1.0,
    )


def _final(error: ServingError) -> ServingError:
    """What the client is told."""
    if isinstance(error, Unavailable):
        return Unavailable(error.public_message, reason=error.reason, retry_after_s=1.0)
    if isinstance(error, Overloaded):
        wait_s = error.retry_after_s or 1.0
        return Overloaded(error.public_message, reason=error.reason, retry_after_s=wait_s)
    return error
