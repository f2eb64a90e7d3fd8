"""Runs generations: route, place, watch, retry, cancel. Every one ends exactly once.

Only the gateway retries: at most three attempts, never on an instance that failed this request,
only while nothing has reached the client, and within a budget shared by all requests.
"""

import asyncio
import random
from collections.abc import Awaitable
from dataclasses import replace
from typing import Final, TypeVar

from finback.services.gateway.desk import Desk
from finback.services.gateway.generation import Generation, Lost
from finback.shared.actor.deadline import Deadline
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

MAX_ATTEMPTS: Final = 3
MAX_CRASHES: Final = 2
# How long an instance is waited for: a restarted one needs a few seconds.
ROUTE_WAIT_S: Final = 10.0
# After the loss of an instance the client hears within 5 s: an answer, or that there is none.
REPLACE_WAIT_S: Final = 4.0
# A hang takes up to 3 s to be noticed, and nobody starts another instance because of it.
REPLACE_HUNG_WAIT_S: Final = 1.5
PLACE_TIMEOUT_S: Final = 3.0
CHUNK_BYTES: Final = 256 * 1024
_PAUSE_S: Final = (0.02, 0.1)


class RetryBudget:
    """Retries may be a tenth of the requests, with room for one crash of a full instance."""

    BURST: Final = 256.0
    SHARE: Final = 0.1

    def __init__(self) -> None:
        self._left = self.BURST

    def earn(self) -> None:
        """A request came."""
        self._left = min(self.BURST, self._left + self.SHARE)

    def spend(self) -> bool:
        """May one more retry be made."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Lifecycle:
    """Drives each `Generation` to its end over the bus."""

    def __init__(self, desk: Desk) -> None:
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
        failed: ServingError | None = None
        for attempt in range(1, MAX_ATTEMPTS + 1):
            generation.begin(attempt)
            try:
                placement = await self._route(generation, _route_wait_s(failed))
            except ServingError as error:
                # That no other instance is there is no news to a client: why it needs one is.
                is_waited = failed is None or isinstance(failed, Unavailable)
                return error if is_waited else _final(generation, failed or error)
            try:
                await self._attempt(generation, placement)
            except ServingError as error:
                if not self._may_retry(generation, error):
                    return _final(generation, error)
                self._note_retry(generation, placement, error)
                failed = error
                await asyncio.sleep(random.uniform(*_PAUSE_S))
            else:
                return None
        raise AssertionError("the last attempt returns")  # _may_retry refuses a fourth

    async def _attempt(self, generation: Generation, placement: RouteReply) -> None:
        """Place and wait for the end; whatever else happens, the engines are told to stop."""
        generation.placement = placement
        self._desk.expect(placement.decode_instance)
        try:
            await _unless_lost(generation, self._place(generation, placement))
            generation.is_accepted = True
            generation.notify.set()
            await generation.wait_attempt()
        finally:
            if not generation.is_complete:
                self._desk.cancel_later(generation.request_id, generation.attempt, placement)
            await self._tell_ended(generation, placement)

    async def _route(self, generation: Generation, wait_s: float) -> RouteReply:
        spec = generation.spec
        request = RouteRequest(
            request_id=spec.request_id,
            model=spec.model,
            num_prompt_tokens=len(spec.token_ids) // 4,
            max_tokens=spec.sampling.max_tokens,
            num_choices=len(spec.choices),
            block_hashes=generation.block_hashes,
            tenant=spec.tenant,
            traffic_class=spec.traffic_class,
            attempt=generation.attempt,
            exclude=generation.excluded,
        )
        waiting = Deadline.after(min(wait_s, generation.deadline.remaining_s()))
        with tracing.span("gateway route") as span:
            while True:
                try:
                    reply = await self._client.call(
                        self._subjects.service("router", "route"),
                        request,
                        RouteReply,
                        timeout_s=max(0.05, min(2.0, waiting.remaining_s())),
                        request_id=spec.request_id,
                        attempt=generation.attempt,
                    )
                except (Unavailable, DeadlineExceeded) as error:
                    if waiting.is_expired:
                        raise _no_instance(error) from error
                    await asyncio.sleep(random.uniform(*_PAUSE_S))
                    continue
                span.set_attribute("finback.route.reason", reply.reason)
                span.set_attribute("finback.route.num_hit_tokens", reply.num_hit_tokens)
                return reply

    async def _place(self, generation: Generation, placement: RouteReply) -> None:
        token_ids = generation.spec.token_ids
        chunks = [token_ids[at : at + CHUNK_BYTES] for at in range(0, len(token_ids), CHUNK_BYTES)]
        request = PrefillRequest(
            spec=replace(generation.spec, attempt=generation.attempt, token_ids=chunks[0]),
            decode_instance=placement.decode_instance,
            decode_epoch=placement.decode_epoch,
            num_chunks=len(chunks),
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

    def _may_retry(self, generation: Generation, error: ServingError) -> bool:
        return (
            error.retryable
            and not generation.is_committed
            and generation.attempt < MAX_ATTEMPTS
            and generation.num_crashes + _is_crash(error) < MAX_CRASHES
            and self._budget.spend()
        )

    def _note_retry(
        self, generation: Generation, placement: RouteReply, error: ServingError
    ) -> None:
        generation.num_crashes += _is_crash(error)
        failed = error.instance if isinstance(error, Lost) else generation.blamed
        if failed is None:  # it was prefill that refused
            failed = placement.prefill_instance
        generation.excluded += (failed,) if failed else ()
        self._desk.metrics.count("finback.gateway.retries", code=error.code)
        self._desk.log.warning(
            "retry",
            request_id=generation.request_id,
            attempt=generation.attempt,
            excluded=generation.excluded,
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


def _route_wait_s(failed: ServingError | None) -> float:
    """How long to wait for an instance; one that is full or failing is not soon another one."""
    if failed is None:
        return ROUTE_WAIT_S
    if isinstance(failed, Lost) and failed.is_hang:
        return REPLACE_HUNG_WAIT_S
    return REPLACE_WAIT_S if isinstance(failed, Unavailable) else 0.0


def _no_instance(error: ServingError) -> Unavailable:
    return Unavailable(
        f"no instance can take the request: {error.public_message}",
        reason="no_instance",
        retry_after_s=error.retry_after_s or 1.0,
    )


def _is_crash(error: ServingError) -> bool:
    return isinstance(error, Lost) and error.is_crash


def _final(generation: Generation, error: ServingError) -> ServingError:
    """What the client is told."""
    if generation.num_crashes + _is_crash(error) >= MAX_CRASHES:
        return InvariantViolated("the request was present at two crashes of engines")
    if isinstance(error, Unavailable):
        return Unavailable(error.public_message, reason=error.reason, retry_after_s=1.0)
    if isinstance(error, Overloaded):
        wait_s = error.retry_after_s or 1.0
        return Overloaded(error.public_message, reason=error.reason, retry_after_s=wait_s)
    return error
