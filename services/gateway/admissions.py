"""Asks the router whether a tenant may.

The eldest router counts for all gateways. One that is lost takes its minute counts with it; what this
gateway holds, the ledger tells the next one at once.
"""

import asyncio
import itertools
from dataclasses import replace
from typing import Final

from finback.services.gateway.closed_doors import ClosedDoors
from finback.services.gateway.grant import TenantLimits
from finback.services.gateway.ledger import Ledger
from finback.shared.actor.client import Client
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.registry import Directory
from finback.shared.clock import monotonic_s
from finback.shared.errors import DeadlineExceeded, Overloaded, ServingError, Unavailable
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.route import AdmitReply, AdmitRequest
from finback.shared.wire.subjects import Subjects

ADMIT_WAIT_S: Final = 10.0
ADMIT_TIMEOUT_S: Final = 2.0
RETRY_PAUSE_S: Final = 0.05


class RateLimited(Overloaded):
    """A tenant's own limit, not a lack of room."""


class NeverFits(ServingError):
    """A prompt above its tenant's whole limit: no waiting helps."""

    code = "resource_exhausted"
    http_status = 429


class Admissions:
    """The way in, for requests of tenants with limits."""

    def __init__(
        self,
        *,
        client: Client,
        subjects: Subjects,
        directory: Directory,
        instance: str,
        ledger: Ledger,
    ) -> None:
        self.ledger = ledger
        self._client = client
        self._subjects = subjects
        self._directory = directory
        self._instance = instance
        self._numbers = itertools.count(1)
        self._doors = ClosedDoors()
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
            self.settle(admission, tenant, 0)  # it may have been let in all the same
            raise
        if not reply.reason:
            self.ledger.hold(admission, tenant)
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
                    replace(request, settled=self.ledger.lately_ended(request.tenant)),
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

    def settle(self, admission: str, tenant: str, num_tokens: int) -> None:
        """A request that was let in is over."""
        self.ledger.settle(admission, tenant, num_tokens)

    def router_may_have_changed(self) -> None:
        """Called at every change of the directory."""
        eldest = self._eldest()
        now = None if eldest is None else (eldest.instance, eldest.epoch)
        if now is not None and now != self._counting:
            self._counting = now
            self._doors.forget()
            self.ledger.tell_all()

    def _eldest(self) -> InstanceRecord | None:
        routers = self._directory.instances("router")
        return min(routers, key=lambda r: (r.epoch, r.instance), default=None)


def _now_ms() -> int:
    return int(monotonic_s() * 1000)


def limited(reply: AdmitReply, tenant: str, limits: TenantLimits) -> ServingError:
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
        return NeverFits(text, reason="rate_limit_exceeded")
    wait_s = reply.retry_after_ms / 1000
    text += f" Try again in {wait_s:.3g} s."
    return RateLimited(text, reason="rate_limit_exceeded", retry_after_s=wait_s)
