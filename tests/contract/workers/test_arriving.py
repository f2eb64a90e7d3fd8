"""Blocks that come layer by layer behind a step that runs: whatever becomes of them, no wrong token.

Deterministic mode with a real engine, cache and bus. Faults are made where bytes are read.
"""

import threading
from pathlib import Path
from typing import Any

import pytest

from finback.shared.engine import arrival as arrivals
from finback.shared.engine.arrival import Arrival, StepGate
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.kv.fetch_policy import RateBook
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.shm_parts import BlockRead
from support.kept_stack import BLOCK_SIZE, KeptStack, kept_stack, prompt_of, undisturbed
from support.nats_server import NatsServer
from support.role_stack import until

pytestmark = pytest.mark.nats

PROMPT = prompt_of(61)
NUM_BLOCKS = 60 // BLOCK_SIZE


async def filled(made: KeptStack) -> None:
    """The prompt's blocks are kept, and nobody else has them."""
    host = await made.worker()
    await made.generate(PROMPT, host)
    await made.settle()
    await made.crash(host)


def arrived(host: WorkerHost, outcome: str = "good") -> float:
    return host.metrics.value("finback.worker.blocks_by_layers", outcome=outcome)


def _num_taken(host: WorkerHost) -> int:
    load = host.engine.load()
    return load.num_blocks - load.num_free_blocks


async def answered(made: KeptStack, host: WorkerHost) -> int:
    """The prompt is answered rightly; how much of it was cached."""
    generation = await made.generate(PROMPT, host)
    assert generation.tokens == undisturbed(PROMPT)
    await made.settle()
    return generation.end.num_cached_tokens


async def test_a_step_begins_before_its_prefix_is_there(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layers are only read once the step has waited for the first ones."""
    has_waited, waited = threading.Event(), []
    wait, read = StepGate.wait, BlockRead.next

    def waiting(gate: StepGate, end: int) -> None:
        wait(gate, end)
        waited.append(end)
        has_waited.set()

    def reading(block: BlockRead, out: memoryview) -> None:
        if block._at:
            assert has_waited.wait(20)
        read(block, out)

    monkeypatch.setattr(StepGate, "wait", waiting)
    monkeypatch.setattr(BlockRead, "next", reading)
    monkeypatch.setattr(arrivals, "MAX_WAIT_S", 20.0)
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await filled(made)
        host = await made.worker()
        assert await answered(made, host) == NUM_BLOCKS * BLOCK_SIZE
        assert arrived(host) == NUM_BLOCKS
        assert waited[:2] == [1, 2]
        # They serve others like any blocks.
        assert await answered(made, host) == NUM_BLOCKS * BLOCK_SIZE
        assert arrived(host) == NUM_BLOCKS


async def test_damage_that_shows_at_the_end_voids_the_step(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, number = BlockRead.next, 0

    def flipping(block: BlockRead, out: memoryview) -> None:
        """A bit of the third block's first layer; the checksum is of the copy."""
        nonlocal number
        number += 1
        if number == 3:
            offset = block._ticket.offset + 5
            with open(made.cache.arena.folder / block._extent.header.name, "r+b") as file:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 4]))
        read(block, out)

    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await filled(made)
        monkeypatch.setattr(BlockRead, "next", flipping)
        host = await made.worker()
        assert await answered(made, host) == 2 * BLOCK_SIZE
        assert arrived(host) == 2 and arrived(host, "checksum") == NUM_BLOCKS - 2
        bad = "finback.cache.bad_blocks"
        await until(lambda: made.cache.metrics.value(bad, reason="checksum") == 1)


@pytest.mark.parametrize("at", [1, NUM_BLOCKS + 2])
async def test_an_arena_that_goes_away_voids_the_step(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
) -> None:
    read, number = BlockRead.next, 0

    def failing(block: BlockRead, out: memoryview) -> None:
        nonlocal number
        number += 1
        if number == at:
            raise CorruptData("gone", "the arena went")
        read(block, out)

    monkeypatch.setattr(BlockRead, "next", failing)
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await filled(made)
        host = await made.worker()
        assert await answered(made, host) == 0
        assert arrived(host, "gone") == NUM_BLOCKS


async def test_a_reader_that_hangs_is_not_waited_for(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room is not given to others before it has stopped writing."""
    goes_on, read = threading.Event(), BlockRead.next
    given_up: list[Arrival] = []

    def hanging(block: BlockRead, out: memoryview) -> None:
        assert goes_on.wait(30)
        read(block, out)

    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await filled(made)
        monkeypatch.setattr(BlockRead, "next", hanging)
        monkeypatch.setattr(arrivals, "MAX_WAIT_S", 0.05)
        give_up = Arrival.give_up

        def noting(arrival: Arrival) -> None:
            given_up.append(arrival)
            give_up(arrival)

        monkeypatch.setattr(Arrival, "give_up", noting)
        host = await made.worker()
        try:
            generation = await made.generate(PROMPT, host)
            assert generation.tokens == undisturbed(PROMPT)
            assert generation.end.num_cached_tokens == 0
            # Blocks that are copied out just now are held as well, for a moment.
            await until(lambda: _num_taken(host) == NUM_BLOCKS)
            host.engine.check_integrity()
        finally:
            goes_on.set()
        await made.settle()
        assert len(given_up) == 1 and given_up[0].is_over
        assert arrived(host, "slow") == NUM_BLOCKS


async def test_cancelled_while_blocks_arrive_nothing_leaks(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, begun = BlockRead.next, threading.Event()

    def slow(block: BlockRead, out: memoryview) -> None:
        begun.set()
        threading.Event().wait(0.004)
        read(block, out)

    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await filled(made)
        monkeypatch.setattr(BlockRead, "next", slow)
        # Else it learns that such a cache is not worth asking.
        monkeypatch.setattr(RateBook, "choose", lambda book, num_found, *rest: num_found)
        host = await made.worker()
        for _ in range(3):
            begun.clear()
            generation: Any = await made.place(PROMPT, host)
            await until(begun.is_set)
            for role in ("prefill", "decode"):
                await made.gateway.cancel(role, host.instance, generation.spec)
            host.engine.check_integrity()
            host.engine.reset_prefix_cache()
        await made.settle()
        monkeypatch.setattr(BlockRead, "next", read)
        await answered(made, host)
