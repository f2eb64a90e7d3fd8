"""Which router is asked, what it is told, and what happens when it cannot be asked."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import pytest

from finback.services.gateway import admissions as module
from finback.services.gateway.admissions import Admissions, RateLimited, limited
from finback.services.gateway.grant import TenantLimits
from finback.services.gateway.ledger import Ledger
from finback.services.router.service import Router
from finback.shared.actor.client import Client
from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.memory_kv import MemoryKV
from finback.shared.config import StackConfig
from finback.shared.errors import Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.route import AdmitReply
from finback.shared.wire.subjects import Subjects
from support.local_service import serving

ONE_AT_ONCE = TenantLimits(max_concurrency=1)


class Routers:
    """The directory as a gateway sees it."""

    def __init__(self) -> None:
        self.records: list[InstanceRecord] = []

    def instances(self, service: str) -> list[InstanceRecord]:
        assert service == "router"
        return self.records

    def add(self, instance: str, epoch: int) -> None:
        self.records.append(
            InstanceRecord(
                service="router", instance=instance, epoch=epoch, pid=1, host="h", state="serving"
            )
        )


class Nest:
    """Two routers and a gateway's admissions."""

    def __init__(self, broker: LocalBroker, routers: dict[str, Router]) -> None:
        self.directory = Routers()
        self.routers = routers
        client, subjects = Client(LocalBus(broker), Subjects()), Subjects()
        common: Any = {"client": client, "subjects": subjects, "instance": "gateway-1"}
        self.ledger = Ledger(**common, metrics=Metrics(), log=Mock())
        directory: Any = self.directory
        self.made = Admissions(**common, directory=directory, ledger=self.ledger)

    async def admit(self, request_id: str, limits: TenantLimits = ONE_AT_ONCE) -> tuple[str, str]:
        admission, reply = await self.made.admit(
            request_id, "t", limits, num_prompt_tokens=1, num_most_tokens=5
        )
        return admission, reply.reason

    def open_at(self, instance: str) -> int:
        return self.routers[instance].tenants.book.num_open("t")


@contextlib.asynccontextmanager
async def nest() -> AsyncIterator[Nest]:
    broker, kv, config = LocalBroker(), MemoryKV(ttl_s=60), StackConfig()
    async with (
        serving(Router, broker=broker, kv=kv, config=config, instance="router-1") as one,
        serving(Router, broker=broker, kv=kv, config=config, instance="router-2") as two,
    ):
        made = Nest(broker, {"router-1": one, "router-2": two})
        made.directory.add("router-2", 20)
        made.directory.add("router-1", 30)
        running = asyncio.create_task(made.ledger.run())
        try:
            yield made
        finally:
            running.cancel()


async def test_the_eldest_is_asked_and_hears_of_ends_first() -> None:
    async with nest() as n:
        for at in range(5):
            admission, reason = await n.admit(f"r{at}")
            assert (reason, n.open_at("router-2"), n.open_at("router-1")) == ("", 1, 0)
            n.made.settle(admission, "t", 3)  # told with the next admission, if not before
        admission, _ = await n.admit("r0")
        assert (await n.admit("r9"))[1] == "tenant_concurrency"


async def test_the_next_router_hears_what_is_held() -> None:
    async with nest() as n:
        n.made.router_may_have_changed()
        admission, _ = await n.admit("r1")
        n.directory.records = [r for r in n.directory.records if r.instance == "router-1"]
        n.made.router_may_have_changed()
        for _ in range(500):
            if n.open_at("router-1"):
                break
            await asyncio.sleep(0.01)
        assert (await n.admit("r2"))[1] == "tenant_concurrency"
        n.made.settle(admission, "t", 0)
        assert (await n.admit("r2"))[1] == ""


async def test_without_a_router_a_request_waits_and_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ADMIT_WAIT_S", 0.2)
    async with nest() as n:
        known, n.directory.records = n.directory.records, []
        with pytest.raises(Unavailable, match="limits cannot be checked"):
            await n.admit("r1")
        waiting = asyncio.create_task(n.admit("r1"))
        await asyncio.sleep(0.05)
        n.directory.records = known
        assert (await waiting)[1] == ""


async def test_a_caller_who_leaves_while_asking_holds_nothing() -> None:
    async with nest() as n:
        asking = asyncio.create_task(n.admit("r1"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await n.admit("r2"))[1] == ""


def test_refusals_in_words() -> None:
    limits = TenantLimits(requests_per_min=60)
    error = limited(AdmitReply(reason="requests_per_min", retry_after_ms=1500), "acme", limits)
    assert isinstance(error, RateLimited)
    text = "Rate limit reached for tenant acme: 60 requests per minute. Try again in 1.5 s."
    assert (error.public_message, error.retry_after_s) == (text, 1.5)
    hopeless = limited(AdmitReply(reason="tokens_per_min", is_hopeless=True), "", limits)
    assert not isinstance(hopeless, RateLimited), "nobody is to try it again"
    assert (hopeless.http_status, hopeless.retry_after_s) == (429, None)
