"""Background responses: made beside all requests, and made again when their gateway died.

The store holds who makes a response (`owner`) and an epoch that rises with every claim. A gateway
adopts what nobody alive makes: its own forgotten ones, those given back, and those whose owner is
no longer in the registry. A gateway that was only taken for dead finds its epoch gone and stops.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any, Final

from finback.services.gateway.caller import Caller
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.responses_attempt import Attempts, grant_json
from finback.services.gateway.responses_keep import kept_of
from finback.services.gateway.responses_object import skeleton
from finback.services.gateway.responses_output_items import Numbering
from finback.services.gateway.responses_plan import Plan
from finback.services.gateway.store import Store
from finback.shared.actor.deadline import Deadline
from finback.shared.errors import Cancelled, Overloaded, ServingError, Unavailable
from finback.shared.telemetry.metrics import Metrics

MAX_OPEN: Final = 1_024
ADOPT_S: Final = 1.0
# How often a log is looked at that another gateway writes.
LOOK_S: Final = 0.2


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
    """`is_alive` says of an instance's name whether that gateway still is there.

    `num_running` are made at once; the others wait, as many as `MAX_OPEN`.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        store: Store,
        attempts: Attempts,
        instance: str,
        is_alive: Callable[[str], bool],
        num_running: int,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._exchange = exchange
        self._store = store
        self._attempts = attempts
        self._instance = instance
        self._is_alive = is_alive
        self._metrics = metrics
        self._log = log
        self._jobs: dict[str, _Job] = {}
        self._slots = asyncio.Semaphore(num_running)

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
            await self._store.leases.queue(kept, saved, self._instance)
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
        wait_s = min(at_most_s, LOOK_S)
        if job is None:
            await asyncio.sleep(wait_s)
            return
        try:
            async with asyncio.timeout(wait_s):
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
        numbering = Numbering()
        kinds = ("response.created", "response.queued")
        documents = [numbering.document(kind, response=body) for kind in kinds]
        await self._store.events.append(plan.response_id, 0, 0, documents)

    async def _adopt(self, *, may_inherit: bool) -> None:
        before = {name: job for name, job in self._jobs.items() if job.epoch}
        rows = await self._store.leases.unfinished()
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

    def _show_open(self) -> None:
        self._metrics.gauge("finback.gateway.background_responses", len(self._jobs))

    def _start(self, response_id: str, job: _Job, epoch: int) -> None:
        job.task = asyncio.create_task(self._run(response_id, job, epoch))
        self._show_open()

        def done(task: "asyncio.Task[None]") -> None:
            if self._jobs.get(response_id) is job:
                del self._jobs[response_id]
            job.tell()
            self._show_open()

        job.task.add_done_callback(done)

    async def _run(self, response_id: str, job: _Job, epoch: int) -> None:
        """One claim of one response, to its end. A failure of ours is the response's own."""
        async with self._slots:
            try:
                stored = await self._store.leases.claim(response_id, epoch, self._instance)
                if stored is None:
                    return
                job.epoch = stored.epoch
                await self._attempts.make(stored, job.tell)
            except Cancelled as error:
                self._log.info("response given up", id=response_id, why=error.public_message)
            except asyncio.CancelledError:
                if job.epoch:
                    await asyncio.shield(self._store.leases.release(response_id, job.epoch))
                raise
            except ServingError as error:  # of the store: it is adopted when that is back
                self._log.warning("response interrupted", id=response_id, error=error)
            except Exception:  # noqa: BLE001 -- the edge: a bug in one must not end others
                self._log.exception("background response failed", response_id=response_id)
