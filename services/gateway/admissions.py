"""Asks the router whether a tenant may, and tells it when a request is over.

The eldest router counts for all gateways. A router that is lost takes its minute counts with it;
what this gateway holds is told to the next one at once, and to all every other second.
"""

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from dataclasses import replace
from typing import Any, Final

from finback.services.gateway.closed_doors import ClosedDoors
from finback.services.gateway.grant import TenantLimits
from finback.shared.actor.client import Client
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.registry import Directory
from finback.shared.clock import monotonic_s
from finback.shared.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.route import AdmitReply, AdmitRequest, TenantLedger
from finback.shared.wire.subjects import Subjects

RENEW_S: Final = 2.0
ADMIT_WAIT_S: Final = 10.0
ADMIT_TIMEOUT_S: Final = 2.0
RETRY_PAUSE_S: Final = 0.05
# An end is told again with every admission of this long: a publish may be lost, or come late.
RECENT_S: Final = 1.0
MAX_RECENT: Final = 1024
# In one message: a few thousand fit into its size.
_MAX_HELD_A_MESSAGE: Final = 4096


class RateLimited(Overloaded):
    """A tenant's own limit, not a lack of room."""


class Admissions:
    """What this gateway holds of tenants' limits."""

    def __init__(
        self,
        *,
        client: Client,
        subjects: Subjects,
        directory: Directory,
        instance: str,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._client = client
        self._subjects = subjects
        self._directory = directory
        self._instance = instance
        self._metrics = metrics
        self._log = log
        self._numbers = itertools.count(1)
        # Tenant by admission.
        self._held: dict[str, str] = {}
        self._recent: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._untold: list[tuple[str, int]] = []
        self._doors = ClosedDoors()
        self._wake = asyncio.Event()
        self._counting: tuple[str, int] | None = None

    async def admit(
        self,
        request_id: str,
        tenant: str,
        limits: TenantLimits,
        *,
        num_prompt_tokens: int,
        num_most_tokens: int,
    ) -> tuple[str, AdmitReply]:
        """The router's word on a request. One that is let in must be settled under the id given.

        Raises `Unavailable` when no router answers in time.
        """
        # A request may come back under its id; each admission is one of its own.
        admission = f"{request_id}~{next(self._numbers)}"
        try:
            reply = await self._admit(
                AdmitRequest(
                    request_id=admission,
                    gateway=self._instance,
                    tenant=tenant,
                    num_prompt_tokens=num_prompt_tokens,
                    num_most_tokens=num_most_tokens,
                    requests_per_min=limits.requests_per_min or 0,
                    tokens_per_min=limits.tokens_per_min or 0,
                    max_concurrency=limits.max_concurrency or 0,
                )
            )
        except BaseException:
            self.settle(admission, 0)  # it may have been let in all the same
            raise
        if not reply.reason:
            self._held[admission] = tenant
        self._doors.note(tenant, limits, reply, _now_ms())
        return admission, reply

    def refusal(self, tenant: str, limits: TenantLimits) -> AdmitReply | None:
        """What the router would say to any request now, if that is known without asking."""
        return self._doors.refusal(tenant, limits, _now_ms())

    async def _admit(self, request: AdmitRequest) -> AdmitReply:
        waiting = Deadline.after(ADMIT_WAIT_S)
        while True:
            router = self._eldest()
            try:
                if router is None:
                    raise Unavailable("there is no router", reason="no_router")
                return await self._client.call(
                    self._subjects.instance("router", router.instance, "admit"),
                    replace(request, settled=self._settled_lately()),
                    AdmitReply,
                    timeout_s=ADMIT_TIMEOUT_S,
                    request_id=request.request_id,
                )
            except (Unavailable, DeadlineExceeded) as error:
                if waiting.is_expired:
                    raise Unavailable(
                        f"a tenant's limits cannot be checked: {error.public_message}",
                        reason="no_router",
                        retry_after_s=1.0,
                    ) from error
                await asyncio.sleep(RETRY_PAUSE_S)

    def settle(self, admission: str, num_tokens: int) -> None:
        """A request that was let in is over; telling it does not wait."""
        self._held.pop(admission, None)
        self._recent[admission] = (num_tokens, monotonic_s())
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        self._untold.append((admission, num_tokens))
        self._wake.set()

    def router_may_have_changed(self) -> None:
        """Called at every change of the directory."""
        eldest = self._eldest()
        now = None if eldest is None else (eldest.instance, eldest.epoch)
        if now is not None and now != self._counting:
            self._counting = now
            self._doors.forget()
            self._wake.set()

    async def run(self) -> None:
        """Run in the service's task group: tell ends soon, and what is held now and then."""
        told = self._counting
        next_s = 0.0
        while True:
            timeout_s = max(0.0, next_s - monotonic_s()) if self._held else RENEW_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            self._wake.clear()
            is_due = monotonic_s() >= next_s or told != self._counting
            if is_due:
                told, next_s = self._counting, monotonic_s() + RENEW_S
            await self._tell(is_due=is_due)

    async def tell_now(self) -> None:
        """Tell the ends that were not told yet; for the end of the service."""
        await self._tell(is_due=False)

    async def _tell(self, *, is_due: bool) -> None:
        settled, self._untold = tuple(self._untold), []
        held = tuple(self._held.items()) if is_due else ()
        if settled:
            await self._publish(settled=settled)
        for at in range(0, len(held), _MAX_HELD_A_MESSAGE):
            await self._publish(held=held[at : at + _MAX_HELD_A_MESSAGE])

    async def _publish(
        self,
        settled: tuple[tuple[str, int], ...] = (),
        held: tuple[tuple[str, str], ...] = (),
    ) -> None:
        ledger = TenantLedger(gateway=self._instance, settled=settled, held=held)
        subject = self._subjects.event("gateway", "tenant-ledger")
        try:
            await self._client.publish(subject, ledger)
        except ServingError as error:
            self._metrics.count("finback.gateway.publish_failures")
            self._log.warning("cannot publish", subject=subject, error=error.public_message)

    def _eldest(self) -> InstanceRecord | None:
        routers = self._directory.instances("router")
        return min(routers, key=lambda r: (r.epoch, r.instance), default=None)

    def _settled_lately(self) -> tuple[tuple[str, int], ...]:
        since_s = monotonic_s() - RECENT_S
        while self._recent:
            admission, (_, at_s) = next(iter(self._recent.items()))
            if at_s >= since_s:
                break
            del self._recent[admission]
        return tuple((i, num_tokens) for i, (num_tokens, _) in self._recent.items())


def _now_ms() -> int:
    return int(monotonic_s() * 1000)


def limited(reply: AdmitReply, tenant: str, limits: TenantLimits) -> RateLimited:
    """Why a request was not let in, in words."""
    whose = f"for tenant {tenant}" if tenant else "here"
    limit, unit = {
        "requests_per_min": (limits.requests_per_min, "requests per minute"),
        "tokens_per_min": (limits.tokens_per_min, "tokens per minute"),
        "tenant_concurrency": (limits.max_concurrency, "requests at once"),
    }.get(reply.reason, (0, "requests"))
    text = f"Rate limit reached {whose}: {limit} {unit}."
    if reply.is_hopeless:
        text += " The prompt alone is larger; make it shorter."
    else:
        text += f" Try again in {reply.retry_after_ms / 1000:.3g} s."
    wait_s = None if reply.is_hopeless else reply.retry_after_ms / 1000
    return RateLimited(text, reason="rate_limit_exceeded", retry_after_s=wait_s)
