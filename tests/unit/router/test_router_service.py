"""The router on a LocalBus: placements, refusals, losses, and two routers side by side."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from finback.services.router.service import Router
from finback.shared.actor.client import Client
from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.memory_kv import MemoryKV
from finback.shared.actor.registry import Registry
from finback.shared.config import StackConfig
from finback.shared.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import InstanceLost, InstanceRecord
from finback.shared.wire.messages.decode import LoadReport
from finback.shared.wire.messages.route import (
    AdmitReply,
    AdmitRequest,
    RequestEnded,
    RouteReply,
    RouteRequest,
    TenantLedger,
)
from finback.shared.wire.subjects import Subjects
from support.local_service import serving

MODEL = "tiny"
SUBJECTS = Subjects()
CONFIG = StackConfig(model_name=MODEL, model_aliases=("gpt-4o",), max_queue=2)


class Nest:
    """A router, a client, and a registry to put workers into."""

    def __init__(self, router: Router, broker: LocalBroker, kv: MemoryKV) -> None:
        self.router = router
        self.client = Client(LocalBus(broker), SUBJECTS)
        self.registry = Registry(kv, ttl_s=60, metrics=Metrics())

    async def add(self, instance: str, *services: str, epoch: int = 1) -> None:
        for service in services:
            await self.registry.register(
                InstanceRecord(
                    service=service,
                    instance=instance,
                    epoch=epoch,
                    pid=1,
                    host="h",
                    state="serving",
                    model=MODEL,
                    num_blocks=100,
                )
            )

    async def route(self, request_id: str = "r", model: str = MODEL, **more: object) -> RouteReply:
        request = RouteRequest(
            request_id=request_id,
            model=model,
            num_prompt_tokens=300,
            max_tokens=16,
            **more,  # type: ignore[arg-type]  # named by each test
        )
        subject = SUBJECTS.service("router", "route")
        return await self.client.call(subject, request, RouteReply, timeout_s=2)

    async def admit(self, request_id: str, tenant: str = "a", **limits: Any) -> AdmitReply:
        request = AdmitRequest(
            request_id=request_id,
            gateway="g",
            tenant=tenant,
            num_prompt_tokens=10,
            num_most_tokens=20,
            **limits,
        )
        subject = SUBJECTS.instance("router", self.router.instance, "admit")
        return await self.client.call(subject, request, AdmitReply, timeout_s=2)

    async def tell(self, service: str, noun: str, message: object) -> None:
        await self.client.publish(SUBJECTS.event(service, noun), message)
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def nest(config: StackConfig = CONFIG) -> AsyncIterator[Nest]:
    broker, kv = LocalBroker(), MemoryKV(ttl_s=60)
    async with serving(Router, broker=broker, kv=kv, config=config) as router:
        yield Nest(router, broker, kv)


async def test_a_pair_and_its_reason() -> None:
    async with nest() as n:
        await n.add("prefill-1", "prefill")
        await n.add("decode-1", "decode", epoch=7)
        reply = await n.route()
        assert (reply.prefill_instance, reply.decode_instance) == ("prefill-1", "decode-1")
        assert (reply.prefill_epoch, reply.decode_epoch) == (1, 7)
        assert "best of 1" in reply.reason


async def test_a_prefix_draws_the_request_back() -> None:
    async with nest() as n:
        for name in ("both-1", "both-2", "both-3"):
            await n.add(name, "prefill", "decode")
        hashes = b"".join(bytes([i]) * 32 for i in range(4))
        first = await n.route("r1", block_hashes=hashes)
        assert first.num_hit_tokens == 0
        await n.tell("gateway", "request-ended", _ended("r1", first.decode_instance))
        again = await n.route("r2", block_hashes=hashes)
        assert again.decode_instance == first.decode_instance
        assert again.num_hit_tokens == 256
        other = await n.route("r3")
        assert other.decode_instance != first.decode_instance


async def test_models_and_aliases() -> None:
    async with nest() as n:
        with pytest.raises(Unavailable, match="no instance serves gpt-4o"):
            await n.route(model="gpt-4o")
        with pytest.raises(NotFound) as missing:
            await n.route(model="nothing")
        assert missing.value.param == "model"
        await n.add("both-1", "prefill", "decode")
        assert (await n.route(model="gpt-4o")).decode_instance == "both-1"
        with pytest.raises(NotFound):
            await n.route(model="nothing")


async def test_excluded_lost_and_draining_instances_get_nothing() -> None:
    async with nest() as n:
        await n.add("both-1", "prefill", "decode")
        with pytest.raises(Unavailable, match="no prefill and decode"):
            await n.route(exclude=("both-1",))
        lost = InstanceLost(service="decode", instance="both-1", epoch=1, reason="killed")
        await n.tell("supervisor", "instance-lost", lost)
        with pytest.raises(Unavailable):
            await n.route()
        await n.add("both-1", "prefill", "decode", epoch=2)
        assert (await n.route()).decode_epoch == 2
        await n.registry.set_state("draining")
        with pytest.raises(Unavailable):
            await n.route()


async def test_a_full_queue_is_429_with_a_time() -> None:
    async with nest() as n:
        await n.add("both-1", "prefill", "decode")
        full = LoadReport(
            instance="both-1",
            epoch=1,
            role="decode",
            num_running=1,
            num_waiting=2,
            num_free_blocks=50,
            num_blocks=100,
            tokens_per_s=32,
        )
        await n.tell("decode", "load", full)
        with pytest.raises(Overloaded) as refused:
            await n.route()
        assert refused.value.reason == "queue_full"
        assert refused.value.retry_after_s == 4.0


async def test_a_tenants_requests_are_counted_until_they_are_settled() -> None:
    async with nest() as n:
        first = await n.admit("r1", max_concurrency=2, requests_per_min=10)
        assert first.requests is not None
        assert (first.reason, first.requests.remaining, first.num_open) == ("", 9, 1)
        await n.admit("r2", max_concurrency=2)
        refused = await n.admit("r3", max_concurrency=2)
        assert (refused.reason, refused.retry_after_ms) == ("tenant_concurrency", 1000)
        assert (await n.admit("r2", max_concurrency=2)).reason == "", "asked again"
        assert (await n.admit("r3", tenant="b", max_concurrency=2)).reason == ""
        await n.tell("gateway", "tenant-ledger", TenantLedger(gateway="g", settled=(("r1", 5),)))
        await n.tell("gateway", "tenant-ledger", TenantLedger(gateway="h", settled=(("r2", 5),)))
        assert (await n.admit("r4", max_concurrency=2)).reason == ""
        assert (await n.admit("r5", max_concurrency=2)).reason == "tenant_concurrency"


async def test_a_new_router_hears_what_gateways_hold() -> None:
    async with nest() as n:
        held = TenantLedger(gateway="g", held=(("r1", "a"), ("r2", "a")))
        await n.tell("gateway", "tenant-ledger", held)
        assert (await n.admit("r3", max_concurrency=2)).reason == "tenant_concurrency"


async def test_odd_hashes_are_refused() -> None:
    async with nest() as n:
        await n.add("both-1", "prefill", "decode")
        with pytest.raises(InvalidRequest, match="multiple of 32"):
            await n.route(block_hashes=b"xyz")


async def test_several_routers_share_the_work() -> None:
    broker, kv = LocalBroker(), MemoryKV(ttl_s=60)
    config = StackConfig(model_name=MODEL)
    async with (
        serving(Router, broker=broker, kv=kv, config=config, instance="router-1") as one,
        serving(Router, broker=broker, kv=kv, config=config, instance="router-2") as two,
    ):
        n = Nest(one, broker, kv)
        await n.add("both-1", "prefill", "decode")
        for i in range(40):
            reply = await n.route(f"r{i}")
            await n.tell("gateway", "request-ended", _ended(f"r{i}", reply.decode_instance))
        for router in (one, two):
            assert router.progress() > 0
            assert router.loads.num_open == 0


def _ended(request_id: str, decode: str) -> RequestEnded:
    return RequestEnded(request_id=request_id, attempt=1, decode_instance=decode)
