"""Prefill in one engine, decode in another, blocks moved between them: the same tokens."""

import asyncio
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Driver
from support.slow_engine import slow_completion
from support.tiny_model import CONFIG, tiny_model

CONFIG_OF_BOTH = EngineConfig(
    num_blocks=40,
    block_size=8,
    max_model_len=100,
    max_num_seqs=2,
    max_num_batched_tokens=16,
    mode="deterministic",
    num_threads=1,
)


def _spec(num_prompt: int, seed: int = 1, key: str = "r") -> SequenceSpec:
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, num_prompt)
    return SequenceSpec(
        key=(key, 0),
        attempt=1,
        token_ids=tokens.astype(np.int32),
        sampling=SamplingSpec(temperature=0.8, max_tokens=12, presence_penalty=0.4),
        seed=seed,
    )


async def _hand_over(source: Driver, target: Driver, spec: SequenceSpec, skipped: set[int]) -> None:
    """What the prefill and decode roles do; blocks in `skipped` never arrive."""
    target.add(replace(spec, mode="decode"))
    source.add(replace(spec, mode="prefill"))
    progress = source.got[spec.key].progress
    await source.until(lambda: bool(progress) and progress[-1].is_last)
    num_tokens = progress[-1].num_computed_tokens
    assert num_tokens == spec.token_ids.size - 1
    size = source.engine.config.block_size
    for index in range(-(-num_tokens // size)):
        buffer = bytearray(source.engine.cache_spec.block_bytes)
        count = await source.engine.export_block(spec.key, index, memoryview(buffer))
        assert count == min(size, num_tokens - index * size)
        data = memoryview(buffer)[: count * (len(buffer) // size)]
        if index in skipped:
            num_tokens = index * size
            break
        await target.engine.import_block(spec.key, index, data)
    source.engine.release(spec.key)
    assert target.engine.activate(spec.key, num_tokens)
    await target.until(lambda: target.got[spec.key].end is not None)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    skipped=st.sets(st.integers(0, 7), max_size=1),
)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_separated_is_cohosted(lengths: list[int], skipped: set[int]) -> None:
    model = tiny_model()
    specs = [_spec(length, seed, f"r{seed}") for seed, length in enumerate(lengths)]

    async def main() -> list[list[int]]:
        source, target = Driver(model, CONFIG_OF_BOTH), Driver(model, CONFIG_OF_BOTH)
        async with source, target:
            async with asyncio.TaskGroup() as tasks:
                for spec in specs:
                    tasks.create_task(_hand_over(source, target, spec, skipped))
            for driver in (source, target):
                driver.engine.check_integrity()
                await driver.until_free()
            return [target.got[spec.key].tokens for spec in specs]

    for spec, tokens in zip(specs, asyncio.run(main()), strict=True):
        expected, _ = slow_completion(model, spec, max_model_len=100, eos_token_ids=())
        assert tokens == expected


def test_a_prefix_hit_at_decode_needs_no_blocks() -> None:
    model = tiny_model()

    async def main() -> None:
        async with Driver(model, CONFIG_OF_BOTH) as driver:
            await driver.run([_spec(33, key="first")])
            admission = driver.engine.add(replace(_spec(33, key="again"), mode="decode"))
            assert admission.num_cached_tokens == 32
            spoiled = memoryview(bytes(driver.engine.cache_spec.block_bytes))
            await driver.engine.import_block(("again", 0), 1, spoiled)  # left as it is
            driver.got["again", 0] = type(driver.got["first", 0])()
            assert driver.engine.activate(("again", 0), 32)
            await driver.until(lambda: driver.got["again", 0].end is not None)
            assert driver.got["again", 0].tokens == driver.got["first", 0].tokens

    asyncio.run(main())


def test_blocks_that_are_not_there() -> None:
    async def main() -> None:
        async with Driver(tiny_model(), CONFIG_OF_BOTH) as driver:
            engine = driver.engine
            block = bytearray(engine.cache_spec.block_bytes)
            with pytest.raises(NotFound):
                await engine.export_block(("nobody", 0), 0, memoryview(block))
            driver.add(replace(_spec(20), mode="decode"))
            with pytest.raises(NotFound):
                await engine.export_block(("r", 0), 0, memoryview(block))
            with pytest.raises(InvalidRequest):
                await engine.import_block(("r", 0), 0, memoryview(block)[:-1])
            with pytest.raises(NotFound):
                await engine.import_block(("r", 0), 3, memoryview(block))
            assert engine.abort(("r", 0))
            with pytest.raises(NotFound):
                await engine.import_block(("r", 0), 0, memoryview(block))

    asyncio.run(main())
