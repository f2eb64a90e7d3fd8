"""Workers forget a tenant, a conversation or everything: in their pools, and in what waits to be stored."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finback.shared.engine.prefix_port import PrefixPort
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import InvalidRequest
from finback.shared.kv.cache_salt import cache_salt_of
from finback.shared.wire.messages.cache_admin import (
    ForgetPoolRequest,
    ForgetReply,
    ForgetRequest,
)
from finback.shared.wire.messages.prefill import Ack
from support.kept_stack import BLOCK_SIZE, KeptStack, kept_stack, prompt_of, undisturbed
from support.nats_server import NatsServer
from support.role_stack import until

pytestmark = pytest.mark.nats

PROMPT = prompt_of(61)
FULL = 60 // BLOCK_SIZE * BLOCK_SIZE


async def cached(made: KeptStack, host: WorkerHost, tenant: str, salt: str = "") -> int:
    """How many tokens of the prompt a request finds."""
    whose = cache_salt_of(tenant, salt)
    generation = await made.generate(PROMPT, host, tenant=tenant, cache_salt=whose)
    assert generation.tokens == undisturbed(PROMPT)
    await made.settle()
    return generation.end.num_cached_tokens


async def forget_pool(made: KeptStack, host: WorkerHost, **what: Any) -> None:
    subject = host.subjects.instance("decode", host.instance, "forget-pool")
    await made.gateway.client.call(subject, ForgetPoolRequest(**what), Ack, timeout_s=30)


async def forget_cache(made: KeptStack, **what: Any) -> ForgetReply:
    subject = made.cache.subjects.instance("cache", made.cache.instance, "forget")
    request = ForgetRequest(**what)
    return await made.gateway.client.call(subject, request, ForgetReply, timeout_s=30)


async def test_a_tenant_is_forgotten_and_no_other(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        host = await made.worker(num_blocks=80)
        for tenant, salt in (("ann", ""), ("ann", "work"), ("bob", "")):
            assert await cached(made, host, tenant, salt) == 0
        await forget_pool(made, host, tenant="ann")
        gone = await forget_cache(made, tenant="ann")
        assert gone.num_host >= 2 * FULL // BLOCK_SIZE
        assert await cached(made, host, "ann") == 0
        assert await cached(made, host, "ann", "work") == 0
        assert await cached(made, host, "bob") == FULL


async def test_a_conversation_is_forgotten_by_its_blocks(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        host = await made.worker(num_blocks=80)
        for tenant in ("ann", "bob"):
            assert await cached(made, host, tenant) == 0
        tokens = host.engine.prefixes.chain(np.array(PROMPT, dtype=np.int32), b"ann")
        hashes = b"".join(tokens)
        await forget_pool(made, host, hashes=hashes)
        await forget_cache(made, hashes=hashes)
        assert await cached(made, host, "bob") == FULL
        assert await cached(made, host, "ann") == 0
        await forget_pool(made, host)
        await forget_cache(made, is_all=True)
        assert await cached(made, host, "bob") == 0
        with pytest.raises(InvalidRequest):
            await forget_pool(made, host, hashes=b"short")


async def test_what_waits_to_be_stored_is_forgotten_and_what_is_being_stored_is_waited_for(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, real = asyncio.Event(), PrefixPort.copy_out

    async def copy_out(self: PrefixPort, *args: Any) -> bool:
        await gate.wait()
        return await real(self, *args)

    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        host = await made.worker(num_blocks=80)
        monkeypatch.setattr(PrefixPort, "copy_out", copy_out)
        for tenant in ("ann", "bob"):
            await made.generate(PROMPT, host, tenant=tenant, cache_salt=tenant)
        await until(lambda: host.write_back._is_storing)
        assert host.write_back.num_waiting > FULL // BLOCK_SIZE
        task = asyncio.create_task(forget_pool(made, host, tenant="ann"))
        await until(
            lambda: host.metrics.value("finback.worker.blocks_kept", outcome="forgotten") > 0
        )
        assert not task.done(), "a block of the tenant is being stored"
        gate.set()
        await task
        await forget_cache(made, tenant="ann")
        await made.settle()
        gone = await forget_cache(made, tenant="ann")
        assert gone.num_host == 0, "nothing came behind"
        assert made.cache.arena.counts().num_kept >= FULL // BLOCK_SIZE, "bob's are there"


async def test_what_is_on_its_way_into_a_pool_does_not_land(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fetch has its tickets; its blocks are forgotten before it has copied them."""
    gate, is_reached, real = asyncio.Event(), threading.Event(), PrefixPort.restore

    async def restore(self: PrefixPort, *args: Any) -> list[bool]:
        is_reached.set()
        await gate.wait()
        return await real(self, *args)

    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        first = await made.worker()
        await cached(made, first, "ann")
        await made.crash(first)
        second = await made.worker()
        second.prefixes.by_layers = False
        monkeypatch.setattr(PrefixPort, "restore", restore)
        generation = await made.place(PROMPT, second, tenant="ann", cache_salt="ann")
        await until(is_reached.is_set)
        await forget_pool(made, second, tenant="ann")
        await forget_cache(made, tenant="ann")
        gate.set()
        await generation.wait()
        assert generation.tokens == undisturbed(PROMPT)
        assert generation.end.num_cached_tokens == 0
        await made.settle()
