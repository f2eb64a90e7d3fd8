"""One attempt at a background response: from its stored request to its stored end."""

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from finback.services.gateway.caller import Caller
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.grant import Grant, TenantLimits
from finback.services.gateway.openai_format import Spelling
from finback.services.gateway.responses_job_sink import JobSink
from finback.services.gateway.responses_object import skeleton
from finback.services.gateway.responses_output_items import Numbering
from finback.services.gateway.responses_plan import Plan, of_json
from finback.services.gateway.responses_protocol import (
    FRESH,
    Opening,
    ResponsesProtocol,
    error_of,
)
from finback.services.gateway.responses_sealed import Seals
from finback.services.gateway.responses_work import responses_work, wants_logprobs, wants_sealed
from finback.services.gateway.store import Store
from finback.services.gateway.store_rows import Kept, Stored
from finback.shared.actor.deadline import Deadline
from finback.shared.errors import (
    Cancelled,
    InvariantViolated,
    Overloaded,
    ServingError,
    Unavailable,
)
from finback.shared.telemetry import tracing

MAX_ATTEMPTS: Final = 3
RETRY_S: Final = 0.5
# The events that a streamed one begins with when it is queued: `created` and `queued`.
NUM_QUEUED_EVENTS: Final = 2


class Attempts:
    """Makes claimed responses. `timeout_s`: how long a refusal for now is tried again."""

    def __init__(self, *, exchange: Exchange, store: Store, seals: Seals, timeout_s: float) -> None:
        self._exchange = exchange
        self._store = store
        self._seals = seals
        self._timeout_s = timeout_s

    async def make(self, stored: Stored, on_news: Callable[[], None]) -> None:
        """Make a claimed response; `on_news` is called after each write.

        Raises `Cancelled` when somebody else's word counts, and what the store raises.
        """
        if stored.num_attempts > MAX_ATTEMPTS:
            return await self._give_up(stored)
        tenant = stored.tenant
        plan = of_json(stored, partial(self._seals.unseal, tenant=tenant))
        body = {**skeleton(plan, self._exchange.model.name), "status": "in_progress"}
        opening, first = await self._opening(stored, plan)
        protocol = new_protocol(
            plan, body, self._exchange, self._seals, tenant, opening=opening, first=first
        )
        sink = JobSink(
            plan, protocol, self._store, tenant=tenant, epoch=stored.epoch, on_news=on_news
        )
        caller = Caller(
            request_id=f"{stored.response_id}-{stored.epoch}",
            tenant=tenant,
            grant=grant_of((stored.plan or {})["grant"]),
        )
        attributes = {tracing.REQUEST_ID: caller.request_id, "gen_ai.operation.name": "chat"}
        flushing = asyncio.create_task(sink.flush_forever())
        try:
            with tracing.span("gateway responses background", attributes):
                await _first_failure(self._serve(plan, protocol, caller, sink), flushing)
        finally:
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)

    async def _serve(
        self, plan: Plan, protocol: ResponsesProtocol, caller: Caller, sink: JobSink
    ) -> None:
        """Nobody waits: what is refused for now is tried again until its time is over."""
        request, deadline = plan.request, Deadline.after(self._timeout_s)
        make_work = partial(
            responses_work,
            plan,
            self._exchange.model,
            protocol,
            tenant=caller.tenant,
            is_stream=bool(request.stream),
        )
        while True:
            try:
                await self._exchange.serve(
                    "responses", make_work, caller, sink, asked_model=request.model or ""
                )
            except (Overloaded, Unavailable) as error:
                if sink.is_begun:
                    raise
                if self._exchange.is_draining:
                    raise asyncio.CancelledError from error
                wait_s = error.retry_after_s or RETRY_S
                if deadline.remaining_s() <= wait_s:
                    return await sink.fail(error)
                await asyncio.sleep(wait_s)
            except ServingError as error:
                if sink.is_begun or isinstance(error, Cancelled):
                    raise
                return await sink.fail(error)
            else:
                return

    async def _give_up(self, stored: Stored) -> None:
        """Made thrice and never finished: it may be what ends its gateways."""
        error = InvariantViolated(f"the response was interrupted {MAX_ATTEMPTS} times")
        body = {**stored.body, "status": "failed", "error": error_of(error)}
        saved = (stored.plan or {}).get("request", {})
        if saved.get("stream"):
            name, epoch = stored.response_id, stored.epoch
            numbering = Numbering(await self._store.events.begin(name, epoch, keeps=-1))
            kinds = ("response.created", "response.failed")
            documents = [numbering.document(kind, response=body) for kind in kinds]
            first = numbering.next - len(documents)
            await self._store.events.append(name, epoch, first, documents)
        kept = Kept(response_id=stored.response_id, tenant=stored.tenant, body=body, items=())
        await self._store.leases.finish(kept, stored.epoch)

    async def _opening(self, stored: Stored, plan: Plan) -> tuple[Opening, int]:
        """What the attempt's stream begins with, and its first number.

        Numbers go on after those of a lost attempt, whose events are forgotten: who followed it
        sees a new `created`, and never one text continued by another.
        """
        if not plan.request.stream:
            return FRESH, 0
        is_first = stored.num_attempts == 1
        number = await self._store.events.begin(
            stored.response_id, stored.epoch, keeps=NUM_QUEUED_EVENTS if is_first else 0
        )
        is_queued = is_first and number == NUM_QUEUED_EVENTS
        return (("response.in_progress",) if is_queued else FRESH), number


def new_protocol(
    plan: Plan,
    body: dict[str, Any],
    exchange: Exchange,
    seals: Seals,
    tenant: str,
    *,
    opening: Opening = FRESH,
    first: int = 0,
) -> ResponsesProtocol:
    """The protocol of one attempt; `body` is the response as it begins."""
    return ResponsesProtocol(
        body,
        spelling=Spelling(exchange.model.tokenizer),
        with_logprobs=wants_logprobs(plan),
        seal=partial(seals.seal, tenant=tenant) if wants_sealed(plan) else None,
        opening=opening,
        first_number=first,
    )


async def _first_failure(work: Any, beside: "asyncio.Task[None]") -> None:
    """Await `work`; if what runs beside it fails first, cancel it and raise that."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, beside], return_when=asyncio.FIRST_COMPLETED)
        if beside.done() and not task.done():
            task.cancel()
            await asyncio.wait([task])
            beside.result()
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])


def grant_json(grant: Grant) -> dict[str, Any]:
    """What a key allows, for the store."""
    saved = dataclasses.asdict(grant)
    return {**saved, "scopes": sorted(grant.scopes), "models": sorted(grant.models)}


def grant_of(saved: dict[str, Any]) -> Grant:
    """The grant again."""
    return Grant(
        **{
            **saved,
            "scopes": frozenset(saved["scopes"]),
            "models": frozenset(saved["models"]),
            "limits": TenantLimits(**saved["limits"]),
        }
    )
