"""Overload, deadlines, drains, and peers that are gone: no request hangs, nothing stays reserved."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import ClassVar

import pytest

from finback.services.cache.service import CacheService
from finback.shared.actor.service import Service
from finback.shared.errors import Overloaded, Unavailable
from finback.shared.lanes.session import SlotLease
from finback.shared.wire.messages.control import InstanceLost
from support.fake_engine import BLOCK_SIZE, expected
from support.nats_server import NatsServer
from support.role_stack import PROMPT, pair, sampling, stack, until

pytestmark = pytest.mark.nats


async def test_a_full_or_failing_arena_costs_no_request(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.start(CacheService)
        prefill, decode = await made.worker("prefill"), await made.worker("decode")

        async def full(request_id: str, num_blocks: int, block_bytes: int) -> SlotLease:
            return SlotLease("00" * 16, ())

        async def failing(lease: SlotLease, written: object, request_id: str = "") -> None:
            raise Unavailable("the cache has died")

        for name, broken, metric in (
            ("reserve", full, "finback.prefill.arena_full"),
            ("commit", failing, "finback.prefill.arena_failures"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(prefill.arena, name, broken)
                # Blocks of a batch are not kept, so they are handed over under leases alone.
                generation = await gateway.generate(PROMPT, sampling(), traffic_class="batch")
            assert generation.tokens == expected(PROMPT, 1, 20)
            assert prefill.metrics.value(metric) > 0
        num_blocks = -(-(len(PROMPT) - 1) // BLOCK_SIZE)
        taken = decode.metrics.value("finback.decode.blocks_taken", lane="nats")
        assert taken == 2 * num_blocks
        assert made.engines[decode.instance].num_recomputed == 0
        assert prefill.nats_lane.num_offered_bytes == 0


async def test_another_epoch_of_decode_is_refused(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        older = dataclasses.replace(decode, epoch=decode.epoch - 1)
        generation = await gateway.place(gateway.spec(PROMPT, sampling()), prefill, older)
        await generation.wait()
        assert generation.failed is not None and generation.failed.code == Unavailable.code
        assert generation.failed.instance == decode.instance
        assert made.engines[decode.instance].sequences == {}


async def test_overload_is_told(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode", max_sequences=1)
        prefill, decode = await pair(gateway)
        first = await gateway.place(gateway.spec(PROMPT, sampling(900)), prefill, decode)
        await first.wait_tokens(1)
        second = await gateway.place(gateway.spec(PROMPT, sampling(5)), prefill, decode)
        await second.wait()
        assert second.failed is not None and second.failed.code == Overloaded.code
        assert not first.is_over


async def test_a_lost_prefill_frees_its_reservations(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        worker = await made.worker("prefill", chunk=1, step_s=0.2)
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        generation = await gateway.place(gateway.spec(PROMPT, sampling()), prefill, decode)
        await until(lambda: bool(made.engines[decode.instance].sequences))
        await made.crash(worker)
        lost = InstanceLost(
            service="prefill", instance=prefill.instance, epoch=prefill.epoch, reason="killed"
        )
        event = gateway.subjects.event("supervisor", "instance-lost")
        await gateway.client.publish(event, lost)
        await generation.wait(30)
        assert generation.end.error_code == Unavailable.code
        assert made.engines[decode.instance].sequences == {}


async def test_a_silent_prefill_is_pinged_and_given_up(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("finback.services.decode.watch._SILENCE_S", 0.3)
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        worker = await made.worker("prefill", chunk=1, step_s=0.5)
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        generation = await gateway.place(gateway.spec(PROMPT, sampling()), prefill, decode)
        await asyncio.sleep(1.0)
        assert not generation.is_over  # it answers pings: only slow
        await made.crash(worker)
        await generation.wait(30)
        assert generation.end.error_code == Unavailable.code


async def test_a_lost_gateway_is_cancelled(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        generation = await gateway.place(gateway.spec(PROMPT, sampling(900)), prefill, decode)
        await generation.wait_tokens(2)
        lost = InstanceLost(service="gateway", instance=gateway.instance, epoch=1, reason="killed")
        event = gateway.subjects.event("supervisor", "instance-lost")
        await gateway.client.publish(event, lost)
        await until(lambda: not made.engines[decode.instance].sequences)


class LeasedGateway(Service):
    """Nothing but a registry entry."""

    name: ClassVar[str] = "gateway"


async def test_a_gateway_without_a_lease_is_cancelled(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    """No supervisor tells: the registry's lease runs out."""
    async with stack(nats_server, subject_prefix, tmp_path, lease_ttl_s=2.0) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode", step_s=0.05)
        leased = await made.start(LeasedGateway)
        prefill, decode = await pair(gateway)
        await gateway.instance_of("gateway")
        spec = dataclasses.replace(gateway.spec(PROMPT, sampling(900)), gateway=leased.instance)
        await gateway.place(spec, prefill, decode)
        await until(lambda: bool(made.engines[decode.instance].sequences))
        await asyncio.sleep(2.5)  # longer than a lease
        assert made.engines[decode.instance].sequences
        await made.crash(leased)
        await until(lambda: not made.engines[decode.instance].sequences, 20)


async def test_a_drained_worker_finishes_then_stops(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        worker = await made.worker("decode")
        prefill, decode = await pair(gateway)
        generation = await gateway.place(gateway.spec(PROMPT, sampling(100)), prefill, decode)
        await generation.wait_tokens(2)
        worker.request_drain()
        await asyncio.sleep(0.05)
        refused = await gateway.place(gateway.spec(PROMPT, sampling(5)), prefill, decode)
        await refused.wait()
        assert refused.failed is not None and refused.failed.code == Unavailable.code
        assert refused.failed.instance == decode.instance
        await generation.wait()
        assert generation.tokens == expected(PROMPT, 1, 100)
        await asyncio.wait_for(made.task_of(worker), 30)


async def test_a_failing_engine_takes_the_service_down(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, _):
        worker = await made.worker("decode")
        made.engines[worker.instance].fail(RuntimeError("device lost"))
        with pytest.raises(BaseExceptionGroup):
            await asyncio.wait_for(made.task_of(worker), 30)


async def test_a_deadline_ends_the_request(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with stack(nats_server, subject_prefix, tmp_path) as (made, gateway):
        await made.worker("prefill")
        await made.worker("decode")
        prefill, decode = await pair(gateway)
        spec = dataclasses.replace(gateway.spec(PROMPT, sampling(900)), timeout_ms=500)
        begun = time.monotonic()
        generation = await (await gateway.place(spec, prefill, decode)).wait()
        assert generation.end.error_code == "deadline_exceeded"
        assert time.monotonic() - begun > 0.3
        assert len(generation.tokens) < 900
