"""DeepSeek V4 in the engine: block KV, state slots, snapshots, replay, hand-over; transformers' tokens."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec, TokenIds
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import SamplingSpec
from support import v4_tiny
from support.engine_driver import Completion, Driver, generate
from support.tiny_folders import hf_logits

BLOCK: Final = 128
CONFIG: Final = EngineConfig(
    num_blocks=24,
    block_size=BLOCK,
    max_model_len=512,
    max_num_seqs=4,
    max_num_batched_tokens=96,
    max_draft_tokens=3,
    num_threads=1,
)
EXACT: Final = replace(CONFIG, mode="deterministic")
REPLAY: Final = len(v4_tiny.RATIOS) * (v4_tiny.WINDOW - 1)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return v4_tiny.tiny_model()


@pytest.fixture(scope="module")
def models(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CausalLM]:
    folder: Path = v4_tiny.write_folder(
        tmp_path_factory.mktemp("v4") / "tiny",
        v4_tiny.published_tensors(oracle),
        v4_tiny.published_config(oracle.config),
    )
    source = open_source(folder)
    fast: CausalLM = load_model(source, mode="fast", num_threads=1)
    exact: CausalLM = load_model(source, mode="deterministic", num_threads=1)
    return {"fast": fast, "exact": exact}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens_of(size: int, seed: int = 1) -> TokenIds:
    return np.random.default_rng(seed).integers(2, 160, size).astype(np.int32)


def spec_of(tokens: TokenIds, key: str = "r", max_tokens: int = 8, **changes: Any) -> SequenceSpec:
    sampling = SamplingSpec(temperature=0.0, max_tokens=max_tokens, num_logprobs=0, ignore_eos=True)
    made = SequenceSpec(key=(key, 0), attempt=1, token_ids=tokens, sampling=sampling, seed=0)
    return replace(made, **changes)


def expected_of(oracle: Any, spec: SequenceSpec) -> list[int]:
    """Greedy tokens of transformers, without a cache."""
    tokens: list[int] = spec.token_ids.tolist()
    for _ in range(spec.sampling.max_tokens):
        tokens.append(int(hf_logits(oracle, tokens)[-1].argmax()))
    return tokens[spec.token_ids.size :]


def logprobs_of(completion: Completion) -> list[float]:
    return [item.logprob for item in completion.logprobs]


def test_batches_equal_transformers(models: dict[str, CausalLM], oracle: Any) -> None:
    """Prompts of unequal lengths, chunked, beside others that decode; fewer slots than sequences."""
    specs = [
        spec_of(tokens_of(n, n), f"r{n}", max_tokens=4 + n % 5) for n in (1, 3, 13, 126, 128, 201)
    ]
    found = generate(models["fast"], CONFIG, specs)
    for spec, completion in zip(specs, found, strict=True):
        assert completion.tokens == expected_of(oracle, spec), spec.key


def test_drafts_change_nothing(models: dict[str, CausalLM]) -> None:
    """Right ones and wrong ones, over the edges of compressed entries and of a block."""
    specs = [spec_of(tokens_of(n, n), f"r{n}", 24) for n in (13, 121)]
    plain = generate(models["fast"], CONFIG, specs)
    truth = {spec.key: done.tokens for spec, done in zip(specs, plain, strict=True)}

    def guess(spec: SequenceSpec, known: TokenIds, _position: int) -> TokenIds:
        coming = truth[spec.key][known.size : known.size + 5]
        wrong = known.size % 3 + 1
        drafts = [(t + (i >= wrong)) % 160 for i, t in enumerate(coming)]
        return np.array(drafts, dtype=np.int32)

    drafted = [replace(spec, drafting=True) for spec in specs]
    found = generate(models["fast"], CONFIG, drafted, drafter=guess)
    assert [c.tokens for c in found] == [c.tokens for c in plain]
    assert sum(c.end.num_accepted_tokens for c in found if c.end) > 0


def test_preempted_sequences_are_the_same(models: dict[str, CausalLM]) -> None:
    specs = [spec_of(tokens_of(n, n), f"r{n}", 70) for n in (60, 62, 65, 63)]
    undisturbed = generate(models["fast"], CONFIG, specs)
    small = replace(CONFIG, num_blocks=5, max_num_batched_tokens=300)

    async def main() -> list[Completion]:
        async with Driver(models["fast"], small) as driver:
            found = await driver.run(specs)
            driver.engine.check_integrity()
            assert driver.engine.load().num_preemptions > 0
            return found

    found = asyncio.run(main())
    assert [c.tokens for c in found] == [c.tokens for c in undisturbed]
    for ours, theirs in zip(found, undisturbed, strict=True):
        assert np.allclose(logprobs_of(ours), logprobs_of(theirs), atol=1e-4)


def test_a_row_s_bits_do_not_depend_on_its_company(models: dict[str, CausalLM]) -> None:
    """Deterministic mode: alone and in chunks of 11, together and in chunks of 96."""
    specs = [spec_of(tokens_of(n, n), f"r{n}", 6) for n in (40, 131)]
    together = generate(models["exact"], EXACT, specs)
    alone = replace(EXACT, max_num_batched_tokens=11)
    for spec, found in zip(specs, together, strict=True):
        single = generate(models["exact"], alone, [spec])[0]
        assert single.tokens == found.tokens
        assert logprobs_of(single) == logprobs_of(found)


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_same_prompt_again(models: dict[str, CausalLM], is_lost: bool) -> None:
    """From its snapshot, or (state lost, blocks there) by an exact replay."""
    spec = spec_of(tokens_of(270), "first")

    async def main() -> None:
        async with Driver(models["exact"], EXACT) as driver:
            engine = driver.engine
            first = (await driver.run([spec]))[0]
            assert engine.states is not None
            if is_lost:
                engine.states.clear()
            again = (await driver.run([replace(spec, key=("again", 0))]))[0]
            assert again.tokens == first.tokens
            assert np.allclose(logprobs_of(again), logprobs_of(first), atol=1e-5)
            assert again.end is not None
            assert engine.states.num_replayed_tokens == (REPLAY if is_lost else 0)
            assert again.end.num_cached_tokens == (256 - REPLAY if is_lost else 256)
            engine.check_integrity()

    asyncio.run(main())


def test_bounded_replay_has_names_of_its_own(models: dict[str, CausalLM]) -> None:
    bounded = replace(CONFIG, state_replay="bounded", state_replay_tokens=v4_tiny.WINDOW)

    async def salts() -> list[str]:
        found = []
        for config in (CONFIG, bounded):
            async with Driver(models["fast"], config) as driver:
                found.append(driver.engine.cache_spec.salt)
        return found

    plain, own = asyncio.run(salts())
    assert plain != own


async def hand_over(source: Driver, target: Driver, spec: SequenceSpec) -> None:
    """What the prefill and decode roles do: blocks and state."""
    target.add(replace(spec, mode="decode"))
    source.add(replace(spec, mode="prefill"))
    progress = source.got[spec.key].progress
    await source.until(lambda: bool(progress) and progress[-1].is_last)
    num_tokens = progress[-1].num_computed_tokens
    for index in range(-(-num_tokens // BLOCK)):
        buffer = memoryview(bytearray(source.engine.cache_spec.block_bytes))
        count = await source.engine.export_block(spec.key, index, buffer)
        await target.engine.import_block(spec.key, index, buffer[: count * (len(buffer) // BLOCK)])
    assert source.engine.states is not None
    assert target.engine.states is not None
    state = source.engine.states.export(spec.key)
    assert state is not None
    target.engine.states.give(spec.key, state[1])
    source.engine.release(spec.key)
    assert target.engine.activate(spec.key, num_tokens)
    await target.until(lambda: target.got[spec.key].end is not None)


@pytest.mark.parametrize("num_prompt", [2, 130, 255])
def test_separated_is_cohosted(models: dict[str, CausalLM], num_prompt: int) -> None:
    """A hand-over in the middle of every kind of window."""
    spec = spec_of(tokens_of(num_prompt), max_tokens=12)

    async def main() -> None:
        whole = generate_in(models["exact"], spec)
        async with (
            Driver(models["exact"], EXACT) as source,
            Driver(models["exact"], EXACT) as target,
        ):
            await hand_over(source, target, spec)
            got = target.got[spec.key]
            expected = await whole
            assert got.tokens == expected.tokens
            assert np.allclose(logprobs_of(got), logprobs_of(expected), atol=1e-5)
            target.engine.check_integrity()

    asyncio.run(main())


async def generate_in(model: CausalLM, spec: SequenceSpec) -> Completion:
    async with Driver(model, EXACT) as driver:
        return (await driver.run([spec]))[0]
