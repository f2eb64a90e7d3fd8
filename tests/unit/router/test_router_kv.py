"""A router that follows publishers: rebuilt after a restart, told of losses, reading ahead."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import ClassVar

from finback.services.router.service import Router
from finback.shared.actor.client import Client
from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.memory_kv import MemoryKV
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.config import StackConfig
from finback.shared.kv.kv_events import KvPublisher
from finback.shared.wire import codec
from finback.shared.wire.messages.cache_store import PrefetchCommand
from finback.shared.wire.messages.control import CacheSpec, InstanceLost, InstanceRecord
from finback.shared.wire.messages.kv import KvEvents
from finback.shared.wire.messages.route import RouteReply, RouteRequest
from finback.shared.wire.subjects import Subjects
from support.local_service import serving
from support.role_stack import until

CONFIG = StackConfig(model_name="tiny", lease_ttl_s=60.0, drain_timeout_s=1.0)
SUBJECTS = Subjects()
SPEC = CacheSpec(
    block_size=64,
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    kv_dtype="f32",
    block_bytes=64 * 1024,
    salt="s",
)
PROMPT = b"".join(bytes([i]) * 32 for i in range(8))


class Holder(Service):
    """A worker with both roles, or a cache, that only tells what it holds."""

    name: ClassVar[str] = "decode"
    roles: ClassVar[tuple[str, ...]] = ("prefill", "decode")

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self.held: dict[tuple[str, str], list[bytes]] = {}
        self.publisher = KvPublisher(self, name=self.role_names()[0], holdings=self.holdings)

    def holdings(self) -> list[tuple[str, str, list[bytes]]]:
        return [(salt, tier, hashes) for (salt, tier), hashes in self.held.items()]

    async def start(self) -> None:
        await self.publisher.start()

    def record(self) -> InstanceRecord:
        return self.base_record(
            roles=self.roles, model="tiny", num_blocks=100, cache_spec=SPEC, host="h"
        )

    def hold(self, tier: str, num_blocks: int) -> None:
        hashes = [PROMPT[32 * i : 32 * i + 32] for i in range(num_blocks)]
        self.held["s", tier] = hashes
        self.publisher.stored("s", tier, hashes)


class Store(Holder):
    name: ClassVar[str] = "cache"
    roles: ClassVar[tuple[str, ...]] = ()

    def record(self) -> InstanceRecord:
        return self.base_record(host="h")


class Nest:
    """A bus, its registry, and a client."""

    def __init__(self) -> None:
        self.broker = LocalBroker()
        self.kv = MemoryKV(ttl_s=60)
        self.bus = LocalBus(self.broker)
        self.client = Client(self.bus, SUBJECTS)

    def router(self, instance: str = "router-1") -> contextlib.AbstractAsyncContextManager[Router]:
        return serving(Router, broker=self.broker, kv=self.kv, config=CONFIG, instance=instance)

    @contextlib.asynccontextmanager
    async def holder(self, instance: str, kind: type[Holder] = Holder) -> AsyncIterator[Holder]:
        async with serving(
            kind, broker=self.broker, kv=self.kv, config=CONFIG, instance=instance
        ) as made:
            yield made

    async def route(self, request_id: str, router: str = "router-1", **more: object) -> RouteReply:
        request = RouteRequest(
            request_id=request_id,
            model="tiny",
            num_prompt_tokens=600,
            max_tokens=16,
            block_hashes=PROMPT,
            **more,  # type: ignore[arg-type]  # named by each test
        )
        subject = SUBJECTS.instance("router", router, "route")
        return await self.client.call(subject, request, RouteReply, timeout_s=2)


def knows(router: Router, num_held: int) -> bool:
    return router.kv.is_ready and sum(router.placer.index.num_held().values()) == num_held


async def test_a_router_knows_what_is_told_and_a_new_one_asks() -> None:
    nest = Nest()
    async with nest.holder("w-1"), nest.holder("w-2") as two:
        async with nest.router() as first:
            await until(lambda: knows(first, 0), timeout_s=5)
            two.hold("device", 6)
            await until(lambda: knows(first, 6), timeout_s=5)
            reply = await nest.route("r1")
            assert reply.decode_instance == "w-2" and reply.num_hit_tokens == 384
            assert reply.reason.startswith("device hit 384 of 600 tokens, queue 0.00 s")
        async with nest.router("router-2") as second, nest.router("router-3") as third:
            for router in (second, third):
                await until(partial(knows, router, 6), timeout_s=5)
                reply = await nest.route("r2", router.instance)
                assert reply.decode_instance == "w-2" and reply.num_hit_tokens == 384


async def test_until_the_index_is_whole_load_counts() -> None:
    nest = Nest()
    async with nest.holder("w-1"), nest.router() as router:
        router.kv._is_ready = False
        silent = KvEvents(service="decode", instance="w-9", epoch=1, seq=1, salt="", tier="")
        await nest.client.publish(SUBJECTS.event("decode", "kv"), silent)  # never answers
        await asyncio.sleep(0.02)
        reply = await nest.route("r1")
        assert reply.reason.endswith("the index is not rebuilt yet")


async def test_a_lost_instance_holds_nothing_and_blocks_are_swept() -> None:
    nest = Nest()
    async with nest.holder("w-1") as one, nest.router() as router:
        one.hold("device", 8)
        await until(lambda: knows(router, 8), timeout_s=5)
        lost = InstanceLost(service="decode", instance="w-1", epoch=one.epoch, reason="killed")
        await nest.client.publish(SUBJECTS.event("supervisor", "instance-lost"), lost)
        await until(lambda: knows(router, 0), timeout_s=5)
        one.hold("device", 7)  # late words of a dead process
        await one.publisher.flush()
        await asyncio.sleep(0.05)
        assert knows(router, 0)
        await until(lambda: len(router.placer.index) == 0, timeout_s=8)


async def test_the_host_of_a_cache_draws_requests_and_the_cache_reads_ahead() -> None:
    nest = Nest()
    heard: list[PrefetchCommand] = []
    async with (
        nest.holder("w-1") as one,
        nest.holder("c-1", Store) as cache,
        nest.router() as router,
    ):
        await nest.bus.subscribe(
            SUBJECTS.instance("cache", "c-1", "prefetch"),
            lambda m: heard.append(codec.decode(m.data, PrefetchCommand)),
        )
        one.hold("device", 2)
        cache.hold("host", 4)
        cache.hold("file", 8)
        await until(lambda: knows(router, 14), timeout_s=5)
        reply = await nest.route("r1")
        assert reply.num_hit_tokens == 512
        assert reply.reason.startswith("device hit 128 + host hit 128 + file hit 256 of 600")
        await until(lambda: bool(heard))
        assert (heard[0].request_id, heard[0].salt) == ("r1", "s")
        assert heard[0].hashes == PROMPT[64:]


async def test_a_conversation_goes_back_to_its_instance() -> None:
    nest = Nest()
    async with nest.holder("w-1"), nest.holder("w-2"), nest.router():
        first = await nest.route("r1", session="talk", tenant="t")
        again = await nest.route("r2", session="talk", tenant="t")
        assert again.decode_instance == first.decode_instance
        assert "same instance as the conversation before" in again.reason
