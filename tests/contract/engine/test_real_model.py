"""The embedded model: together, chunked, preempted, drafted and handed over, the tokens of alone."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec, TokenIds
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Driver, generate

NUM_TOKENS = 24
ALONE = EngineConfig(
    num_blocks=16,
    block_size=32,
    max_model_len=512,
    max_num_seqs=1,
    max_num_batched_tokens=512,
    mode="deterministic",
    num_threads=2,
    overlap_below_ms=0.0,
    prefix_caching=False,
)
# Room for four prompts but not for four answers, in chunks of few rows.
CROWDED = replace(
    ALONE,
    num_blocks=8,
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=40,
    overlap_below_ms=1e9,
    prefix_caching=True,
)


@pytest.fixture(scope="module")
def model() -> Iterator[CausalLM]:
    loaded = load_model(open_source("embedded"), "cpu", "deterministic", num_threads=2)
    yield loaded
    loaded.close()


def _specs() -> list[SequenceSpec]:
    rng = np.random.default_rng(3)
    shared = rng.integers(100, 40000, 40)
    specs = []
    for index, length in enumerate((20, 50, 9, 24)):
        sampling = SamplingSpec(
            temperature=0.8 if index % 2 else 0.0,
            top_p=0.9,
            frequency_penalty=0.5 if index > 1 else 0.0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        specs.append(
            SequenceSpec(
                key=(f"r{index}", 0),
                attempt=1,
                token_ids=np.append(shared, rng.integers(100, 40000, length)).astype(np.int32),
                sampling=sampling,
                seed=index,
                drafting=index != 1,
            )
        )
    return specs


@pytest.fixture(scope="module")
def alone(model: CausalLM) -> list[list[int]]:
    return [generate(model, ALONE, [spec])[0].tokens for spec in _specs()]


@pytest.mark.slow
def test_preempted_is_alone(model: CausalLM, alone: list[list[int]]) -> None:
    async def main() -> None:
        async with Driver(model, CROWDED) as driver:
            completions = await driver.run(_specs())
            assert [completion.tokens for completion in completions] == alone
            assert driver.engine.load().num_preemptions > 0
            driver.engine.check_integrity()

    asyncio.run(main())


@pytest.mark.slow
def test_drafted_is_alone(model: CausalLM, alone: list[list[int]]) -> None:
    """Guesses are right but for every sixth token."""
    specs = _specs()
    truth = {spec.key: tokens for spec, tokens in zip(specs, alone, strict=True)}

    def guess(spec: SequenceSpec, _known: TokenIds, position: int) -> TokenIds:
        start = position - spec.token_ids.size
        tokens = list(truth[spec.key][start : start + 9])
        if len(tokens) > 5:
            tokens[5] += 1
        return np.array(tokens, dtype=np.int32)

    completions = generate(model, CROWDED, specs, drafter=guess)
    assert [completion.tokens for completion in completions] == alone
    assert any(c.end and c.end.num_accepted_tokens for c in completions)


@pytest.mark.slow
def test_handed_over_is_alone(model: CausalLM, alone: list[list[int]]) -> None:
    spec = _specs()[1]

    async def main() -> None:
        source, target = Driver(model, CROWDED), Driver(model, CROWDED)
        async with source, target:
            target.add(replace(spec, mode="decode"))
            source.add(replace(spec, mode="prefill"))
            progress = source.got[spec.key].progress
            await source.until(lambda: bool(progress) and progress[-1].is_last)
            num_tokens = progress[-1].num_computed_tokens
            block = bytearray(source.engine.cache_spec.block_bytes)
            token_bytes = len(block) // CROWDED.block_size
            for index in range(-(-num_tokens // CROWDED.block_size)):
                count = await source.engine.export_block(spec.key, index, memoryview(block))
                data = memoryview(block)[: count * token_bytes]
                await target.engine.import_block(spec.key, index, data)
            assert target.engine.activate(spec.key, num_tokens)
            await target.until(lambda: target.got[spec.key].end is not None)
            assert target.got[spec.key].tokens == alone[1]

    asyncio.run(main())
