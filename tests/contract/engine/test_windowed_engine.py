"""A model with sliding-window layers in the engine: the oracle's tokens, whatever gets lost on the way."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec, TokenIds
from finback.shared.errors import ConfigError, InvalidRequest, NotFound
from finback.shared.models.causal_lm import StatefulLM
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, Driver, generate
from support.tiny_folders import hf_logits
from support.windowed import REPLAY, WINDOW, windowed_model, windowed_oracle

BLOCK = 8
CONFIG = EngineConfig(
    num_blocks=60,
    block_size=BLOCK,
    max_model_len=160,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    max_draft_tokens=3,
    num_threads=1,
)
EXACT = replace(CONFIG, mode="deterministic")


def _tokens(size: int, seed: int = 1) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 96, size).astype(np.int32)


def _spec(tokens: TokenIds, key: str = "r", max_tokens: int = 14, **changes: Any) -> SequenceSpec:
    sampling = SamplingSpec(temperature=0.0, max_tokens=max_tokens, num_logprobs=0)
    return replace(
        SequenceSpec(key=(key, 0), attempt=1, token_ids=tokens, sampling=sampling, seed=0),
        **changes,
    )


def _expected(oracle: Any, spec: SequenceSpec) -> list[int]:
    """Greedy tokens of transformers, without a cache."""
    tokens: list[int] = spec.token_ids.tolist()
    for _ in range(spec.sampling.max_tokens):
        tokens.append(int(hf_logits(oracle, tokens)[-1].argmax()))
    return tokens[spec.token_ids.size :]


def _logprobs(completion: Completion) -> list[float]:
    return [item.logprob for item in completion.logprobs]


def test_batches_equal_transformers() -> None:
    """Prompts of unequal lengths, chunked, beside others that decode; fewer slots than sequences."""
    oracle = windowed_oracle()
    sizes = [1, 5, WINDOW, 17, 41, 60, 90]
    specs = [_spec(_tokens(n, n), f"r{n}", max_tokens=5 + n % 7) for n in sizes]
    completions = generate(windowed_model(), CONFIG, specs)
    for spec, completion in zip(specs, completions, strict=True):
        assert completion.tokens == _expected(oracle, spec), spec.key


@pytest.mark.parametrize("wrong", [0, 3, 5])
def test_drafts_change_nothing(wrong: int) -> None:
    """Drafts that are right up to token `wrong`; the first is sampled before the guess is looked at."""
    specs = [_spec(_tokens(n, n), f"r{n}", 30) for n in (13, 44)]
    plain = generate(windowed_model(), CONFIG, specs)
    truth = {spec.key: done.tokens for spec, done in zip(specs, plain, strict=True)}

    def guess(spec: SequenceSpec, known: TokenIds, _position: int) -> TokenIds:
        coming = truth[spec.key][known.size : known.size + 5]
        drafts = [(t + (i >= wrong)) % 96 for i, t in enumerate(coming)]
        return np.array(drafts, dtype=np.int32)

    drafted = [replace(spec, drafting=True) for spec in specs]
    completions = generate(windowed_model(), CONFIG, drafted, drafter=guess)
    assert [c.tokens for c in completions] == [c.tokens for c in plain]
    accepted = sum(c.end.num_accepted_tokens for c in completions if c.end)
    assert (accepted > 0) == (wrong > 0)


def test_preempted_sequences_begin_again_where_their_state_is() -> None:
    specs = [_spec(_tokens(n, n), f"r{n}", 40) for n in (30, 33, 35, 21)]
    undisturbed = generate(windowed_model("deterministic"), EXACT, specs)
    small = replace(EXACT, num_blocks=20)

    async def main() -> list[Completion]:
        async with Driver(windowed_model("deterministic"), small) as driver:
            found = await driver.run(specs)
            driver.engine.check_integrity()
            assert driver.engine.load().num_preemptions > 0
            return found

    found = asyncio.run(main())
    assert [c.tokens for c in found] == [c.tokens for c in undisturbed]
    assert [_logprobs(c) for c in found] == [_logprobs(c) for c in undisturbed]


def test_a_second_turn_goes_on_from_the_answer_s_end() -> None:
    async def main() -> None:
        async with Driver(windowed_model("deterministic"), EXACT) as driver:
            first = await driver.run([_spec(_tokens(37), "first", 30)])
            history = np.concatenate([_tokens(37), np.array(first[0].tokens), _tokens(9, 5)])
            second = _spec(history.astype(np.int32), "second")
            again = (await driver.run([second]))[0]
            async with Driver(windowed_model("deterministic"), EXACT) as other:
                fresh = (await other.run([second]))[0]
            assert again.tokens == fresh.tokens
            assert _logprobs(again) == _logprobs(fresh)
            assert again.end is not None
            # 66 of 67 tokens have KV; the last snapshot lies at the end of their last full block.
            assert again.end.num_cached_tokens == 66 // BLOCK * BLOCK
            assert driver.engine.states is not None
            assert driver.engine.states.num_replayed_tokens == 0
            driver.engine.check_integrity()

    asyncio.run(main())


@pytest.mark.parametrize("is_lost", [True, False])
def test_the_same_prompt_again(is_lost: bool) -> None:
    """From its snapshot, or (state lost, blocks there) by a replay: the same bits."""
    spec = _spec(_tokens(61), "first")

    async def main() -> None:
        async with Driver(windowed_model("deterministic"), EXACT) as driver:
            engine = driver.engine
            first = (await driver.run([spec]))[0]
            assert engine.states is not None
            if is_lost:
                engine.states.clear()
            again = (await driver.run([replace(spec, key=("again", 0))]))[0]
            assert again.tokens == first.tokens
            assert _logprobs(again) == _logprobs(first)
            assert again.end is not None
            assert again.end.num_cached_tokens == (56 - REPLAY if is_lost else 56)
            assert engine.states.num_replayed_tokens == (REPLAY if is_lost else 0)
            # The replay has left a snapshot again.
            third = (await driver.run([replace(spec, key=("third", 0))]))[0]
            assert third.end is not None
            assert third.end.num_cached_tokens == 56
            assert _logprobs(third) == _logprobs(first)
            engine.check_integrity()

    asyncio.run(main())


def test_another_end_of_a_shared_prefix() -> None:
    """No snapshot lies where two prompts part: the blocks are shared, the state is replayed."""
    shared = _tokens(48)
    specs = [_spec(np.concatenate([shared, _tokens(n, n)]), f"r{n}") for n in (9, 11)]

    async def main() -> list[Completion]:
        async with Driver(windowed_model("deterministic"), EXACT) as driver:
            found = [(await driver.run([spec]))[0] for spec in specs]
            assert driver.engine.states is not None
            assert driver.engine.states.num_replayed_tokens == REPLAY
            return found

    found = asyncio.run(main())
    fresh = generate(windowed_model("deterministic"), replace(EXACT, prefix_caching=False), specs)
    assert [_logprobs(c) for c in found] == [_logprobs(c) for c in fresh]


async def _hand_over(source: Driver, target: Driver, spec: SequenceSpec, lost: str) -> None:
    """What the prefill and decode roles do."""
    target.add(replace(spec, mode="decode"))
    source.add(replace(spec, mode="prefill"))
    progress = source.got[spec.key].progress
    await source.until(lambda: bool(progress) and progress[-1].is_last)
    num_tokens = progress[-1].num_computed_tokens
    for index in range(-(-num_tokens // BLOCK)):
        if lost == "block" and index == 3:
            num_tokens = index * BLOCK
            break
        buffer = memoryview(bytearray(source.engine.cache_spec.block_bytes))
        count = await source.engine.export_block(spec.key, index, buffer)
        data = buffer[: count * (len(buffer) // BLOCK)]
        await target.engine.import_block(spec.key, index, data)
    assert source.engine.states is not None
    assert target.engine.states is not None
    state = source.engine.states.export(spec.key)
    assert state is not None
    assert state[0] == spec.token_ids.size + spec.completion.size - 1
    if lost != "state":
        target.engine.states.give(spec.key, state[1])
    source.engine.release(spec.key)
    assert target.engine.activate(spec.key, num_tokens)
    await target.until(lambda: target.got[spec.key].end is not None)


@pytest.mark.parametrize("lost", ["", "state", "block"])
@pytest.mark.parametrize("num_prompt", [2, 40, 41, 60])
def test_separated_is_cohosted(num_prompt: int, lost: str) -> None:
    spec = _spec(_tokens(num_prompt))
    alone = generate(windowed_model("deterministic"), EXACT, [spec])[0]

    async def main() -> None:
        model = windowed_model("deterministic")
        async with Driver(model, EXACT) as source, Driver(model, EXACT) as target:
            await _hand_over(source, target, spec, lost)
            assert target.got[spec.key].tokens == alone.tokens
            assert _logprobs(target.got[spec.key]) == _logprobs(alone)
            # Once more: prefill has all of it cached, state too, and computes a little or nothing.
            await _hand_over(source, target, replace(spec, key=("again", 0)), "")
            assert _logprobs(target.got["again", 0]) == _logprobs(alone)
            for driver in (source, target):
                driver.engine.check_integrity()
                await driver.until_free()

    asyncio.run(main())


def test_an_answer_begun_elsewhere_is_handed_over_with_its_state() -> None:
    """As after the death of a decode instance: prompt and answer so far are computed again, and given."""
    whole = generate(windowed_model("deterministic"), EXACT, [_spec(_tokens(40), max_tokens=30)])[0]
    begun = np.array(whole.tokens[:13], dtype=np.int32)
    spec = _spec(_tokens(40), max_tokens=30, completion=begun)

    async def main() -> None:
        model = windowed_model("deterministic")
        async with Driver(model, EXACT) as source, Driver(model, EXACT) as target:
            await _hand_over(source, target, spec, "")
            assert target.got[spec.key].tokens == whole.tokens[13:]
            assert _logprobs(target.got[spec.key]) == _logprobs(whole)[13:]
            assert target.engine.states is not None
            assert target.engine.states.num_replayed_tokens == 0

    asyncio.run(main())


def test_state_that_does_not_fit() -> None:
    async def main() -> None:
        async with Driver(windowed_model(), CONFIG) as driver:
            states = driver.engine.states
            assert states is not None
            driver.add(_spec(_tokens(20), mode="decode"))
            with pytest.raises(InvalidRequest, match="24 bytes at least"):
                states.give(("r", 0), b"short")
            with pytest.raises(NotFound):
                states.give(("nobody", 0), bytes(states.payload_bytes))
            with pytest.raises(NotFound):
                states.export(("r", 0))

    asyncio.run(main())


def test_bounded_replay_is_a_class_of_its_own() -> None:
    """Fewer tokens again, other numbers, and another salt: nobody exact ever finds them."""
    bounded = replace(EXACT, state_replay="bounded", state_replay_tokens=WINDOW)
    enough = replace(bounded, state_replay_tokens=REPLAY)
    spec = _spec(_tokens(61), "first")

    async def run(config: EngineConfig) -> tuple[str, list[float], list[float]]:
        async with Driver(windowed_model("deterministic"), config) as driver:
            first = (await driver.run([spec]))[0]
            assert driver.engine.states is not None
            driver.engine.states.clear()
            again = (await driver.run([replace(spec, key=("again", 0))]))[0]
            assert driver.engine.states.num_replayed_tokens == min(
                config.state_replay_tokens, REPLAY
            )
            return driver.engine.cache_spec.salt, _logprobs(first), _logprobs(again)

    exact = asyncio.run(run(EXACT))
    approximate = asyncio.run(run(bounded))
    assert approximate[1] == exact[1]  # nothing was lost yet
    assert exact[2] == exact[1]
    assert approximate[2] != approximate[1]
    assert approximate[0] != exact[0]
    as_good = asyncio.run(run(enough))
    assert as_good == exact


def test_what_is_announced_and_counted() -> None:
    async def main() -> None:
        async with Driver(windowed_model(), CONFIG) as driver:
            spec, memory = driver.engine.cache_spec, driver.engine.sizes.memory
            row = 3 * 2 * 2 * 32 * 4
            assert (spec.num_layers, spec.window_tokens, spec.replay_tokens) == (1, WINDOW, REPLAY)
            assert spec.state_bytes == 24 + (WINDOW - 1) * row
            ring = WINDOW + CONFIG.max_draft_tokens + 1
            assert memory.state_bytes == 4 * ring * row + CONFIG.state_snapshot_bytes
            assert "+ state 64 MiB" in memory.line()

    asyncio.run(main())
    huge = replace(CONFIG, state_snapshot_bytes=1 << 50)
    with pytest.raises(ConfigError, match="lower max_num_seqs or state_snapshot_bytes"):
        generate(windowed_model(), huge, [])


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = windowed_model()
    assert isinstance(model, StatefulLM)
    spec = model.state_spec()
    odd = replace(spec, parts=(replace(spec.parts[0], period_tokens=3),))
    with monkeypatch.context() as patch:
        patch.setattr(model, "state_spec", lambda _: odd)
        with pytest.raises(ConfigError, match="block_size is 8; this model needs a multiple of 3"):
            generate(model, CONFIG, [])
    monkeypatch.setattr(model, "decode", None, raising=False)
    with pytest.raises(ConfigError, match="cannot decode by recorded programs yet"):
        generate(model, CONFIG, [])


def test_logits_at_every_step_are_the_oracle_s() -> None:
    """The chosen tokens' logprobs, within float32's reach."""
    oracle, spec = windowed_oracle(), _spec(_tokens(50))
    completion = generate(windowed_model(), CONFIG, [spec])[0]
    tokens = [*spec.token_ids.tolist(), *completion.tokens]
    wanted = hf_logits(oracle, tokens)[49:-1].log_softmax(-1)
    chosen = wanted.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(_logprobs(completion)), chosen, atol=1e-4, rtol=0)
