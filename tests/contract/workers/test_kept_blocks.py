"""What one worker computed serves another: real engines, a real cache, a real bus.

Deterministic mode: whatever is fetched, lost, damaged or cancelled, tokens are those of an undisturbed
run.
"""

import asyncio
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from finback.shared.engine.worker_host import WorkerHost
from finback.shared.kv.kv_events import EVENT
from finback.shared.lanes.arena_format import SlotState
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.shm_parts import BlockRead
from finback.shared.wire import codec
from finback.shared.wire.messages.generate import SamplingSpec
from finback.shared.wire.messages.kv import KvEvents
from support.kept_stack import BLOCK_SIZE, KeptStack, kept_stack, prompt_of, undisturbed
from support.nats_server import NatsServer
from support.role_stack import until

pytestmark = pytest.mark.nats

PROMPT = prompt_of(61)
FULL = 60 // BLOCK_SIZE * BLOCK_SIZE


def restored(host: WorkerHost) -> float:
    return host.metrics.value("finback.worker.prefix_blocks", tier="host")


def stored(host: WorkerHost) -> float:
    return host.metrics.value("finback.worker.blocks_kept", outcome="stored")


async def filled(made: KeptStack, prompt: list[int] = PROMPT, **more: Any) -> WorkerHost:
    """A worker that has computed a prompt, whose blocks are kept."""
    host = await made.worker()
    generation = await made.generate(prompt, host, **more)
    assert generation.tokens == undisturbed(prompt)
    assert generation.end.num_cached_tokens == 0
    await made.settle()
    return host


async def test_a_worker_takes_up_what_another_computed(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        first = await filled(made)
        # The answer's blocks are kept too, as far as they are full and committed.
        assert stored(first) == (len(PROMPT) + 11) // BLOCK_SIZE
        await made.crash(first)
        second = await made.worker()
        generation = await made.generate(PROMPT, second)
        assert generation.tokens == undisturbed(PROMPT)
        assert generation.end.num_cached_tokens == FULL
        assert restored(second) == FULL // BLOCK_SIZE
        await made.settle()
        # The next turn of the conversation finds the answer's blocks as well.
        turn = [*PROMPT, *generation.tokens, *prompt_of(9, seed=7)]
        third = await made.worker()
        generation = await made.generate(turn, third)
        assert generation.tokens == undisturbed(turn)
        assert generation.end.num_cached_tokens == (len(PROMPT) + 11) // BLOCK_SIZE * BLOCK_SIZE
        await made.settle()


async def test_split_roles_hand_over_by_hash(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill, decode = await made.worker("prefill"), await made.worker("decode")
        generation = await made.generate(PROMPT, prefill, decode)
        assert generation.tokens == undisturbed(PROMPT)
        await made.settle()
        # Written once: prompt blocks by prefill, those of the answer by decode.
        num_prompt = FULL // BLOCK_SIZE
        assert stored(prefill) == num_prompt
        assert stored(decode) == (len(PROMPT) + 11) // BLOCK_SIZE - num_prompt
        assert made.cache.arena.counts().num_kept == stored(prefill) + stored(decode)
        # Decode reads the prefix by itself; nothing is left for prefill to compute or fetch.
        await made.crash(decode)
        await made.crash(prefill)
        prefill, decode = await made.worker("prefill"), await made.worker("decode")
        generation = await made.generate(PROMPT, prefill, decode)
        assert generation.tokens == undisturbed(PROMPT)
        assert generation.end.num_cached_tokens == FULL
        assert restored(decode) == num_prompt and restored(prefill) == 0
        # A longer prompt: prefill fetches what it needs to go on, and computes the rest.
        longer = [*PROMPT, *prompt_of(40, seed=3)]
        generation = await made.generate(longer, prefill, decode)
        assert generation.tokens == undisturbed(longer)
        assert restored(prefill) == num_prompt
        assert generation.end.num_cached_tokens == FULL
        await made.settle()


async def test_a_prompt_that_prefill_has_is_not_written_twice(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill, decode = await made.worker("prefill"), await made.worker("decode")
        await made.generate(PROMPT, prefill, decode)
        await made.settle()
        await made.crash(decode)
        num_before = stored(prefill)
        other = await made.worker("decode", num_blocks=20)
        longer = PROMPT[:50] + prompt_of(30, seed=5)
        generation = await made.generate(longer, prefill, other)
        assert generation.tokens == undisturbed(longer)
        assert stored(prefill) == num_before + 79 // BLOCK_SIZE - 50 // BLOCK_SIZE
        await made.settle()


@pytest.mark.parametrize("how", [{"traffic_class": "batch"}, {"retention_s": 0.0}])
async def test_what_nobody_wants_kept_is_not(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, how: dict[str, Any]
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prefill, decode = await made.worker("prefill"), await made.worker("decode")
        generation = await made.generate(PROMPT, prefill, decode, **how)
        assert generation.tokens == undisturbed(PROMPT)
        await made.settle()
        assert made.cache.arena.counts().num_kept == 0


async def test_tenants_do_not_share(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        host = await filled(made, cache_salt="one")
        generation = await made.generate(PROMPT, host, cache_salt="two")
        assert generation.end.num_cached_tokens == 0
        other = await made.worker()
        for salt, num_cached in (("three", 0), ("one", FULL)):
            generation = await made.generate(PROMPT, other, cache_salt=salt)
            assert generation.tokens == undisturbed(PROMPT)
            assert generation.end.num_cached_tokens == num_cached
        await made.settle()


async def test_a_damaged_block_is_a_miss(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await made.crash(await filled(made))
        _flip_a_byte(made, block_index=3)
        host = await made.worker()
        generation = await made.generate(PROMPT, host)
        assert generation.tokens == undisturbed(PROMPT)
        assert generation.end.num_cached_tokens == 3 * BLOCK_SIZE
        assert host.metrics.value("finback.worker.bad_blocks", reason="checksum") == 1
        assert host.metrics.value("finback.worker.prefix_misses", cause="checksum") > 0
        bad = "finback.cache.bad_blocks"
        await until(lambda: made.cache.metrics.value(bad, reason="checksum") == 1)
        await made.settle()
        # It was computed and kept anew.
        other = await made.worker()
        generation = await made.generate(PROMPT, other)
        assert generation.end.num_cached_tokens == FULL
        await made.settle()


def _flip_a_byte(made: KeptStack, block_index: int) -> None:
    arena = made.cache.arena
    for (extent_id, index), header in arena.book.slots():
        label = header.label if header.state is SlotState.KEPT else None
        if label is not None and label.block_index == block_index:
            extent = arena._files.extent(extent_id)
            with open(arena.folder / extent.name, "r+b") as file:
                file.seek(extent.slot_offset(index) + header.length // 2)
                byte = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([byte ^ 0x10]))
            return
    raise AssertionError("no such block is kept")


async def test_files_outlive_everything(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "kv")
    async with kept_stack(nats_server, subject_prefix, tmp_path, cache_dir=folder) as made:
        await made.crash(await filled(made))
        num_blocks = FULL // BLOCK_SIZE
        written = "finback.cache.write_backs"
        await until(lambda: made.cache.metrics.value(written, outcome="written") >= num_blocks, 10)
        await made.stop_cache()
        shutil.rmtree(tmp_path / "shm")
        await made.start_cache()
        assert made.cache.arena.counts().num_kept == 0
        host = await made.worker()
        generation = await made.generate(PROMPT, host)
        assert generation.tokens == undisturbed(PROMPT)
        assert generation.end.num_cached_tokens == FULL
        assert host.metrics.value("finback.worker.prefix_blocks", tier="file") == num_blocks
        await made.settle()


@pytest.mark.parametrize("by_layers", [False, True])
async def test_the_cache_may_die_at_any_moment(
    nats_server: NatsServer,
    subject_prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_layers: bool,
) -> None:
    kind, name = (BlockRead, "next") if by_layers else (ArenaReader, "read_now")
    async with kept_stack(
        nats_server, subject_prefix, tmp_path, cache_fetch_by_layers=by_layers
    ) as made:
        await made.crash(await filled(made))
        host = await made.worker()
        read, num_read, lock = getattr(kind, name), 0, threading.Lock()
        loop = asyncio.get_running_loop()

        def dying(*arguments: Any) -> Any:
            """On a thread of its own, as a reader is."""
            nonlocal num_read
            with lock:
                num_read += 1
                is_the_third = num_read == 3
            if is_the_third:
                asyncio.run_coroutine_threadsafe(made.crash_cache(), loop).result(10)
                raise CorruptData("gone", "the arena went")
            return read(*arguments)

        monkeypatch.setattr(kind, name, dying)
        generation = await made.generate(PROMPT, host)
        assert generation.tokens == undisturbed(PROMPT)
        assert num_read >= 3
        assert generation.end.num_cached_tokens < FULL
        # Without a cache everything goes on; a new one over the same arena serves again.
        other = prompt_of(40, seed=9)
        assert (await made.generate(other, host)).tokens == undisturbed(other)
        await made.start_cache()
        assert made.cache.arena.counts().num_kept > 0
        late = await made.worker()
        generation = await made.generate(PROMPT, late)
        assert generation.end.num_cached_tokens == FULL


async def test_a_pool_that_is_too_small_fetches_less(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    """Two prompts that the pool cannot hold together: fetching never keeps one from going on."""
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        prompts = [prompt_of(90, seed) for seed in (1, 2, 3)]
        first = await made.worker()
        for prompt in prompts:
            await made.generate(prompt, first)
        await made.settle()
        await made.crash(first)
        small = await made.worker(num_blocks=15)
        placed = [await made.place(prompt, small) for prompt in prompts * 2]
        for prompt, generation in zip(prompts * 2, placed, strict=True):
            await generation.wait()
            assert generation.tokens == undisturbed(prompt)
        await made.settle()


async def test_restored_blocks_survive_preemption(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        long = SamplingSpec(temperature=0.8, max_tokens=50)
        prompts = [prompt_of(50, seed) for seed in (1, 2, 3)]
        first = await made.worker()
        for prompt in prompts:
            await made.generate(prompt, first, sampling=long)
        await made.settle()
        await made.crash(first)
        host = await made.worker(num_blocks=24)
        placed = [await made.place(prompt, host, sampling=long) for prompt in prompts]
        for prompt, generation in zip(prompts, placed, strict=True):
            await generation.wait()
            assert generation.tokens == undisturbed(prompt, long)
        assert restored(host) > 0
        assert host.engine.load().num_preemptions > 0
        await made.settle()


@pytest.mark.parametrize("layout", ["co-hosted", "split"])
async def test_cancelled_at_any_moment_nothing_leaks(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path, layout: str
) -> None:
    draw = random.Random(layout)
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        await made.crash(await filled(made))
        if layout == "co-hosted":
            prefill = decode = await made.worker(num_blocks=40)
        else:
            prefill, decode = await made.worker("prefill"), await made.worker("decode")
        for _ in range(25):
            prefill.engine.reset_prefix_cache()
            decode.engine.reset_prefix_cache()
            prompt = PROMPT[: draw.choice((20, 40, 61))] + prompt_of(draw.randrange(30), seed=3)
            generation = await made.place(prompt, prefill, decode)
            await asyncio.sleep(draw.random() * 0.03)
            await made.gateway.cancel("prefill", prefill.instance, generation.spec)
            await made.gateway.cancel("decode", decode.instance, generation.spec)
        await made.settle()
        generation = await made.generate(PROMPT, prefill, decode)
        assert generation.tokens == undisturbed(PROMPT)
        await made.settle()


async def test_the_pool_tells_what_it_holds(
    nats_server: NatsServer, subject_prefix: str, tmp_path: Path
) -> None:
    async with kept_stack(nats_server, subject_prefix, tmp_path) as made:
        events: list[KvEvents] = []
        bus, subject = made.gateway.bus, made.gateway.subjects.event("prefill", EVENT)
        await bus.subscribe(subject, lambda m: events.append(codec.decode(m.data, KvEvents)))
        host = await filled(made)
        held: set[bytes] = set()

        def told() -> bool:
            for event in events:
                held.difference_update(_split(event.removed))
                held.update(_split(event.stored))
            events.clear()
            return held == set(host.engine.prefixes.hashes())

        await until(told)
        assert len(held) >= FULL // BLOCK_SIZE
        host.engine.reset_prefix_cache()
        await until(told)
        assert not held


def _split(joined: bytes) -> list[bytes]:
    return [joined[at : at + 32] for at in range(0, len(joined), 32)]
