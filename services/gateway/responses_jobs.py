"""Background responses: made beside all requests, and made again when their gateway died.

The store holds who makes a response (`owner`) and an epoch that rises with every claim. A gateway
adopts what nobody alive makes: its own forgotten ones, those given back, and those whose owner is
no longer in the registry. A gateway that was only taken for dead finds its epoch gone and stops.
"""

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
from finback.services.gateway.responses_keep import kept_of
from finback.services.gateway.responses_object import skeleton
from finback.services.gateway.responses_output import Numbering
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
from finback.services.gateway.store_responses import Kept, Stored
from finback.shared.actor.deadline import Deadline
from finback.shared.errors import (
    Cancelled,
    InvariantViolated,
    Overloaded,
    ServingError,
    Unavailable,
)
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics

MAX_RUNNING: Final = 64
MAX_OPEN: Final = 1_024
MAX_ATTEMPTS: Final = 3
ADOPT_S: Final = 1.0
RETRY_S: Final = 0.5
# The events that a streamed one begins with when it is queued: `created` and `queued`.
NUM_QUEUED_EVENTS: Final = 2


@dataclasses.dataclass(slots=True)
class _Job:
    """One that this gateway makes or is about to. `epoch`: of its claim, 0 before."""

    task: "asyncio.Task[None] | None" = None
    epoch: int = 0
    news: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def tell(self) -> None:
        """Wake who follows."""
        news, self.news = self.news, asyncio.Event()
        news.set()


class Jobs:
    """`is_alive` says of an instance's name whether that gateway still is there."""

    def __init__(
        self,
        *,
        exchange: Exchange,
        store: Store,
        seals: Seals,
        instance: str,
        is_alive: Callable[[str], bool],
        timeout_s: float,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._exchange = exchange
        self._store = store
        self._seals = seals
        self._instance = instance
        self._is_alive = is_alive
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._log = log
        self._jobs: dict[str, _Job] = {}
        self._slots = asyncio.Semaphore(MAX_RUNNING)

    async def submit(self, plan: Plan, caller: Caller) -> dict[str, Any]:
        """Store a response as queued and begin to make it; returns it as it is now."""
        if self._exchange.is_draining:
            raise Unavailable("the gateway is stopping", reason="draining", retry_after_s=1.0)
        if len(self._jobs) >= MAX_OPEN:
            raise Overloaded(
                f"{len(self._jobs)} background responses wait already", retry_after_s=5.0
            )
        body = skeleton(plan, self._exchange.model.name)
        job = self._jobs[plan.response_id] = _Job()
        try:
            saved = {**plan.to_json(), "grant": grant_json(caller.grant)}
            kept = kept_of(plan, body, caller.tenant)
            await self._store.responses.queue(kept, saved, self._instance)
            if plan.request.stream:
                await self._log_queued(plan, body)
        except BaseException:
            del self._jobs[plan.response_id]
            raise
        self._start(plan.response_id, job, 0)
        return body

    def forget(self, response_id: str) -> None:
        """It was cancelled or deleted: stop making it, if it is made here."""
        job = self._jobs.get(response_id)
        if job is not None and job.task is not None:
            job.task.cancel()

    async def wait_news(self, response_id: str, at_most_s: float) -> None:
        """Return when there may be news of a response, after `at_most_s` at the latest."""
        job = self._jobs.get(response_id)
        if job is None:
            await asyncio.sleep(min(at_most_s, 0.2))  # another gateway makes it
            return
        try:
            async with asyncio.timeout(at_most_s):
                await job.news.wait()
        except TimeoutError:
            return

    async def adopt_forever(self, grace_s: float) -> None:
        """Run in the service's task group. For `grace_s` the registry may name no longer all."""
        begun = Deadline.after(grace_s)
        while True:
            try:
                await self._adopt(may_inherit=begun.is_expired)
            except ServingError as error:
                self._log.warning("cannot look for orphans", error=error.public_message)
            await asyncio.sleep(ADOPT_S)

    async def stop(self) -> None:
        """Give back what is not finished."""
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _log_queued(self, plan: Plan, body: dict[str, Any]) -> None:
        numbering = self._protocol(plan, body, "").numbering
        kinds = ("response.created", "response.queued")
        documents = [numbering.document(kind, response=body) for kind in kinds]
        await self._store.events.append(plan.response_id, 0, 0, documents)

    async def _adopt(self, *, may_inherit: bool) -> None:
        before = {name: job for name, job in self._jobs.items() if job.epoch}
        rows = await self._store.responses.unfinished()
        epochs = {name: epoch for name, _, epoch in rows}
        for name, job in before.items():
            if epochs.get(name, job.epoch + 1) > job.epoch:
                self.forget(name)
        if self._exchange.is_draining:
            return
        for name, owner, epoch in rows:
            if name in self._jobs or len(self._jobs) >= MAX_OPEN:
                continue
            is_ours = owner in ("", self._instance)
            if is_ours or (may_inherit and not self._is_alive(owner)):
                self._metrics.count("finback.gateway.adopted_responses")
                self._log.info("adopting a response", response_id=name, owner=owner)
                job = self._jobs[name] = _Job()
                self._start(name, job, epoch)

    def _start(self, response_id: str, job: _Job, epoch: int) -> None:
        job.task = asyncio.create_task(self._run(response_id, job, epoch))

        def done(task: "asyncio.Task[None]") -> None:
            if self._jobs.get(response_id) is job:
                del self._jobs[response_id]
            job.tell()

        job.task.add_done_callback(done)

    async def _run(self, response_id: str, job: _Job, epoch: int) -> None:
        """One claim of one response, to its end. A failure of ours is the response's own."""
        async with self._slots:
            stored = await self._store.responses.claim(response_id, epoch, self._instance)
            if stored is None:
                return
            job.epoch = stored.epoch
            try:
                await self._make(stored, job)
            except Cancelled as error:
                self._log.info("response given up", id=response_id, why=error.public_message)
            except asyncio.CancelledError:
                await asyncio.shield(self._store.responses.release(response_id, stored.epoch))
                raise
            except ServingError as error:  # of the store: it is adopted when that is back
                self._log.warning("response interrupted", id=response_id, error=error)
            except Exception:  # noqa: BLE001 -- the edge: a bug in one must not end others
                self._log.exception("background response failed", response_id=response_id)

    async def _make(self, stored: Stored, job: _Job) -> None:
        if stored.num_attempts > MAX_ATTEMPTS:
            return await self._give_up(stored)
        tenant = stored.tenant
        plan = of_json(stored, partial(self._seals.unseal, tenant=tenant))
        body = {**skeleton(plan, self._exchange.model.name), "status": "in_progress"}
        opening, first = await self._opening(stored, plan)
        protocol = self._protocol(plan, body, tenant, opening=opening, first=first)
        sink = JobSink(
            plan, protocol, self._store, tenant=tenant, epoch=stored.epoch, on_news=job.tell
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
            numbering = Numbering(await self._store.events.begin(stored.response_id, keeps=-1))
            kinds = ("response.created", "response.failed")
            documents = [numbering.document(kind, response=body) for kind in kinds]
            first = numbering.next - len(documents)
            await self._store.events.append(stored.response_id, stored.epoch, first, documents)
        kept = Kept(response_id=stored.response_id, tenant=stored.tenant, body=body, items=())
        await self._store.responses.finish(kept, stored.epoch)

    async def _opening(self, stored: Stored, plan: Plan) -> tuple[Opening, int]:
        """What the attempt's stream begins with, and its first number.

        Numbers go on after those of a lost attempt, whose events are forgotten: who followed it
        sees a new `created`, and never one text continued by another.
        """
        if not plan.request.stream:
            return FRESH, 0
        is_first = stored.num_attempts == 1
        number = await self._store.events.begin(
            stored.response_id, keeps=NUM_QUEUED_EVENTS if is_first else 0
        )
        is_queued = is_first and number == NUM_QUEUED_EVENTS
        return (("response.in_progress",) if is_queued else FRESH), number

    def _protocol(
        self,
        plan: Plan,
        body: dict[str, Any],
        tenant: str,
        *,
        opening: Opening = FRESH,
        first: int = 0,
    ) -> ResponsesProtocol:
        return new_protocol(
            plan, body, self._exchange, self._seals, tenant, opening=opening, first=first
        )


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
