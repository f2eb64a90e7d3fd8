"""Peers that hang with their connections open, and messages about blocks that go astray."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.services.cache.slots import size_class
from finback.services.router.service import Router
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import ServingError
from finback.shared.kv import block_hash, kv_follower
from finback.shared.kv.stored_block import geometry_of, payload_bytes
from finback.shared.lanes.arena_format import PAGE, SLOT_HEADER_BYTES
from finback.shared.wire.messages.kv import KvEvents
from finback.shared.wire.messages.route import RouteReply, RouteRequest
from support.kept_stack import BLOCK_SIZE, KeptStack, prompt_of, undisturbed
from support.nats_server import NatsServer
from support.role_stack import stack, until
from support.service_process import ServiceProcess
from support.worker_nest import Nest
from support.worker_stack import MiniGateway

pytestmark = [pytest.mark.nats, pytest.mark.timeout(300)]

PROMPT = prompt_of(41)
FULL = 40 // BLOCK_SIZE * BLOCK_SIZE


@contextlib.contextmanager
def cache_process(server: NatsServer, prefix: str, folder: Path) -> Iterator[ServiceProcess]:
    """A cache that can be stopped, for the workers of a `KeptStack` with the same arguments."""
    settings = {
        "NATS_URL": server.url,
        "RUN_DIR": str(folder / "run"),
        "SHM_DIR": str(folder / "shm"),
        "STACK_ID": prefix,
        "SUBJECT_PREFIX": prefix,
        "ARENA_BYTES": str(1 << 24),
    }
    process = ServiceProcess("cache", {f"FINBACK_{k}": v for k, v in settings.items()}).start()
    try:
        yield process
    finally:
        process.kill()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill",)])
async def test_a_cache_that_hangs_is_done_without_and_used_again(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, roles: tuple[str, ...]
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (nest, gateway):
        made = KeptStack(nest, gateway)
        with cache_process(nats_server, subject_prefix, tmp_path) as cache:
            first = await made.worker(*roles)
            second = first if len(roles) == 2 else await made.worker("decode")
            await until(lambda: first.cache.is_there and second.cache.is_there, 30)
            await made.generate(PROMPT, first, second)
            os.kill(cache.pid, signal.SIGSTOP)
            try:
                for number in range(3):
                    other = prompt_of(41, seed=20 + number)
                    async with asyncio.timeout(30):
                        generation = await made.generate(other, first, second)
                    assert generation.tokens == undisturbed(other)
                await until(lambda: not first.cache.is_there, 30)
                assert first.metrics.value("finback.worker.cache_failures") > 0
            finally:
                os.kill(cache.pid, signal.SIGCONT)
            await until(lambda: first.cache.is_there, 30)
            late = await made.worker(*roles)
            await until(lambda: late.cache.is_there, 30)
            generation = await made.generate(PROMPT, late, second)
            assert generation.tokens == undisturbed(PROMPT)
            assert generation.end.num_cached_tokens == FULL
            await until(lambda: not any(host.cache.num_leases for host in made.workers), 30)
            for host in made.workers:
                host.engine.check_integrity()
                await host.engine.stop()


async def test_an_arena_that_is_removed_under_workers(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    """The cache ends itself, its supervisor (here: the test) starts the next, and it goes on."""
    async with stack(nats_server, subject_prefix, tmp_path) as (nest, gateway):
        made = KeptStack(nest, gateway)
        with cache_process(nats_server, subject_prefix, tmp_path) as cache:
            host = await made.worker()
            await until(lambda: host.cache.is_there, 30)
            assert (await made.generate(PROMPT, host)).tokens == undisturbed(PROMPT)
            shutil.rmtree(tmp_path / "shm")
            for number in range(3):
                other = prompt_of(41, seed=30 + number)
                async with asyncio.timeout(30):
                    assert (await made.generate(other, host)).tokens == undisturbed(other)
            assert await asyncio.to_thread(cache.wait, 30) == 1
            assert any("the arena's files are gone" in line for line in cache.lines)
            assert (await made.generate(PROMPT, host)).tokens == undisturbed(PROMPT)
            await asyncio.to_thread(cache.start)
            await until(lambda: host.cache.is_there, 30)
            again = prompt_of(41, seed=40)
            await made.generate(again, host)
            await until(lambda: not host.write_back.num_waiting)
            late = await made.worker()
            await until(lambda: late.cache.is_there, 30)
            assert (await made.generate(again, late)).end.num_cached_tokens == FULL
            for worker in made.workers:
                worker.engine.check_integrity()
                await worker.engine.stop()


async def test_events_that_come_twice_late_or_never(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever becomes of single messages, the router ends up knowing what the worker holds."""
    monkeypatch.setattr(kv_follower, "GRACE_S", 0.2)
    rng = random.Random(6)
    waiting: list[tuple[str, Any]] = []
    fates: list[str] = []
    async with stack(nats_server, subject_prefix, tmp_path) as (nest, gateway):
        made = KeptStack(nest, gateway)
        router = await router_of(nest)
        host = await made.worker()
        publish = host.client.publish_bare

        async def astray(subject: str, message: Any, *rest: Any, **more: Any) -> None:
            if not isinstance(message, KvEvents) or not message.removed + message.stored:
                return await publish(subject, message, *rest, **more)
            # Each of them, then whatever comes.
            fate = ("twice", "lost", "late", "fine")[
                len(fates) if len(fates) < 4 else rng.randrange(4)
            ]
            fates.append(fate)
            if fate == "late":
                waiting.append((subject, message))
                return None
            for _ in range({"lost": 0, "twice": 2, "fine": 1}[fate]):
                await publish(subject, message, *rest, **more)
            while waiting and rng.random() < 0.5:
                await publish(*waiting.pop(rng.randrange(len(waiting))))
            return None

        monkeypatch.setattr(host.client, "publish_bare", astray)
        for number in range(60):
            prompt = prompt_of(41, seed=number)
            assert (await made.generate(prompt, host)).tokens == undisturbed(prompt)
            await asyncio.sleep(0.02)
            if len(fates) >= 12:
                break
        for late in waiting:
            await publish(*late)
        monkeypatch.setattr(host.client, "publish_bare", publish)
        await made.generate(prompt_of(41, seed=99), host)
        held = sum(len(hashes) for _, _, hashes in host._holdings())
        await until(lambda: sum(router.placer.index.num_held().values()) == held, 30)
        counts = dataclasses.asdict(router.kv._subscriber.counts())
        assert counts["num_gaps"] > 0 and counts["num_duplicates"] > 0
        host.engine.check_integrity()
        await host.engine.stop()


async def router_of(nest: Nest) -> Router:
    service = await nest.start(Router)
    assert isinstance(service, Router)
    return service


async def test_a_router_that_stands_still_is_dropped_and_learns_what_it_missed(
    subject_prefix: str, tmp_path: Path
) -> None:
    """A slow consumer of events: the server closes its connection, nobody else notices."""
    server = NatsServer(
        folder=tmp_path / "nats", extra="max_pending: 9000000\nwrite_deadline: '500ms'"
    )
    server.start()
    env = {"NATS_URL": server.url, "STACK_ID": subject_prefix, "SUBJECT_PREFIX": subject_prefix}
    env |= {"RUN_DIR": str(tmp_path / "run"), "MODEL_NAME": "m"}
    router = ServiceProcess("router", {f"FINBACK_{k}": v for k, v in env.items()}).start()
    try:
        async with stack(server, subject_prefix, tmp_path) as (nest, gateway):
            made = KeptStack(nest, gateway)
            host = await made.worker()
            await made.generate(PROMPT, host)
            await until_hit(gateway, PROMPT)
            router_pid = router.pid
            os.kill(router_pid, signal.SIGSTOP)
            missed = prompt_of(41, seed=50)
            generation = await made.generate(missed, host)
            assert generation.tokens == undisturbed(missed)
            log = tmp_path / "nats" / "nats.log"
            large = KvEvents(
                service="decode",
                instance="w-9",
                epoch=1,
                seq=1,
                salt="s",
                tier="device",
                stored=os.urandom(32 * 4096),
            )
            subject = gateway.subjects.event("decode", "kv")
            async with asyncio.timeout(30):
                while "Slow Consumer" not in log.read_text():
                    for _ in range(50):
                        await gateway.client.publish_bare(subject, large)
                    await asyncio.sleep(0.1)
            os.kill(router_pid, signal.SIGCONT)
            await until_hit(gateway, missed)
            assert gateway.client.bus.is_connected and host.client.bus.is_connected
            await host.engine.stop()
    finally:
        router.kill()
        server.kill()


async def until_hit(gateway: MiniGateway, prompt: list[int]) -> None:
    """Until a router knows that a worker holds this prompt's full blocks."""
    root = block_hash.prompt_root(b"", b"", BLOCK_SIZE)
    data = np.asarray(prompt, dtype="<i4").tobytes()
    hashes = b"".join(block_hash.extend_all(root, data, BLOCK_SIZE, b""))
    subject = gateway.subjects.service("router", "route")
    async with asyncio.timeout(30):
        for number in itertools.count():
            request = RouteRequest(
                request_id=f"look-{number}",
                model="m",
                num_prompt_tokens=len(prompt),
                max_tokens=1,
                block_hashes=hashes,
            )
            with contextlib.suppress(ServingError):
                reply = await gateway.client.call(subject, request, RouteReply, timeout_s=2)
                if reply.num_hit_tokens == FULL:
                    return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("num_slots", [0, 2])
async def test_an_arena_too_small_for_one_prompt(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, num_slots: int
) -> None:
    """What has no room takes another lane or is computed again; the beginning is kept."""
    async with stack(nats_server, subject_prefix, tmp_path) as (nest, gateway):
        made = KeptStack(nest, gateway)
        one = made_of(await made.worker("prefill", "decode"))
        # Smaller than any setting allows, as the model is.
        nest.config = dataclasses.replace(nest.config, arena_bytes=2 * PAGE + num_slots * one)
        await made.start_cache()
        for roles in (("prefill", "decode"), ("prefill",)):
            first = await made.worker(*roles)
            second = first if len(roles) == 2 else await made.worker("decode")
            for _ in range(2):
                generation = await made.generate(PROMPT, first, second)
                assert generation.tokens == undisturbed(PROMPT)
        await until(lambda: made.cache.metrics.value("finback.cache.not_stored", reason="full") > 0)
        await made.settle()
        assert min(1, num_slots) <= made.cache.arena.counts().num_kept <= num_slots
        for host in made.workers:
            await host.engine.stop()


def made_of(host: WorkerHost) -> int:
    """Bytes of the arena that one block takes."""
    length = payload_bytes(geometry_of(host.engine.cache_spec))
    return size_class(length) + SLOT_HEADER_BYTES
