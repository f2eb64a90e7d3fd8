"""A completion that another engine began goes on with the very tokens that it would have had."""

import asyncio
import dataclasses
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.causal_lm import CausalLM
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, Driver, generate
from support.tiny_model import CONFIG, tiny_model, tiny_resident

PROMPT = np.random.default_rng(3).integers(4, CONFIG.vocab_size, 21).astype(np.int32)
ENGINE = EngineConfig(
    num_blocks=24,
    block_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    mode="deterministic",
    num_threads=1,
)


def spec_of(sampling: SamplingSpec, **more: object) -> SequenceSpec:
    made = SequenceSpec(
        key=("r", 0), attempt=1, token_ids=PROMPT, sampling=sampling, seed=99, drafting=False
    )
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # fields of the spec


@pytest.mark.parametrize("make_model", [tiny_model, tiny_resident])
@given(
    temperature=st.sampled_from([0.0, 0.9]),
    penalty=st.sampled_from([0.0, 0.8]),
    min_tokens=st.sampled_from([0, 12]),
    cut=st.integers(1, 29),
    logprobs=st.sampled_from([None, 2]),
)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_it_goes_on_as_if_undisturbed(
    make_model: Callable[[], CausalLM],
    temperature: float,
    penalty: float,
    min_tokens: int,
    cut: int,
    logprobs: int | None,
) -> None:
    sampling = SamplingSpec(
        temperature=temperature,
        presence_penalty=penalty,
        repetition_penalty=1.0 + penalty / 4,
        min_tokens=min_tokens,
        max_tokens=30,
        stop_token_ids=tuple(range(20, 30)),
        num_logprobs=logprobs,
    )
    spec = spec_of(sampling)
    (whole,) = generate(make_model(), ENGINE, [spec])
    assert whole.end is not None
    cut = min(cut, len(whole.tokens) - 1)
    if not cut:
        return
    begun = np.array(whole.tokens[:cut], dtype=np.int32)
    rest = go_on(make_model(), dataclasses.replace(spec, attempt=2, completion=begun))
    assert rest.tokens == whole.tokens[cut:]
    # The op-by-op model's logits differ in the last bits with the rows of a step.
    assert [entry.top_ids for entry in rest.logprobs] == [e.top_ids for e in whole.logprobs[cut:]]
    assert [entry.logprob for entry in rest.logprobs] == pytest.approx(
        [entry.logprob for entry in whole.logprobs[cut:]], abs=1e-4
    )
    assert rest.end is not None
    assert rest.end.finish_reason == whole.end.finish_reason
    assert rest.end.num_completion_tokens == len(whole.tokens)
    assert rest.end.num_prompt_tokens == PROMPT.size


def go_on(model: CausalLM, spec: SequenceSpec) -> Completion:
    """What one sequence, which has begun, still brings."""

    async def main() -> Completion:
        async with Driver(model, ENGINE) as driver:
            driver.add(spec)
            first = driver.got[spec.key] = Completion()
            await driver.until(lambda: first.end is not None)
            driver.engine.check_integrity()
            return first

    return asyncio.run(main())


async def test_a_mask_is_wanted_behind_the_known_tokens() -> None:
    spec = spec_of(
        SamplingSpec(max_tokens=8), has_grammar=True, completion=np.array([5, 6], dtype=np.int32)
    )
    async with Driver(tiny_model(), ENGINE) as driver:
        driver.add(spec)
        await driver.until(lambda: driver.wants_mask(spec.key) is not None)
        assert driver.wants_mask(spec.key) == 2


async def test_a_hand_over_covers_what_is_known_of_the_answer() -> None:
    sampling = SamplingSpec(max_tokens=12, ignore_eos=True, temperature=0.0)
    whole = (await _alone(spec_of(sampling))).tokens
    begun = np.array(whole[:5], dtype=np.int32)
    num_known = PROMPT.size + begun.size
    async with Driver(tiny_model(), ENGINE) as giver, Driver(tiny_model(), ENGINE) as taker:
        held = spec_of(sampling, mode="prefill", completion=begun)
        giver.add(held)
        await giver.until(lambda: any(p.is_last for p in giver.got[held.key].progress))
        assert giver.got[held.key].progress[-1].num_computed_tokens == num_known - 1
        taken = spec_of(sampling, mode="decode", completion=begun)
        taker.add(taken)
        rest = taker.got[taken.key] = Completion()
        for index in range(-(-(num_known - 1) // ENGINE.block_size)):
            data = bytearray(taker.engine.cache_spec.block_bytes)
            count = await giver.engine.export_block(held.key, index, memoryview(data))
            size = len(data) // ENGINE.block_size * count
            await taker.engine.import_block(taken.key, index, memoryview(data)[:size])
        assert taker.engine.activate(taken.key, num_known - 1, 0)
        await taker.until(lambda: rest.end is not None)
        assert list(rest.tokens) == whole[5:]
        assert sum(c.num_tokens for s in taker.steps for c in s.chunks) <= 1


async def _alone(spec: SequenceSpec) -> Completion:
    async with Driver(tiny_model(), ENGINE) as driver:
        return (await driver.run([spec]))[0]


@pytest.mark.parametrize(("completion", "reason"), [(8, "no_room"), ([-1], "bad_token")])
async def test_what_cannot_go_on_is_refused(completion: int | list[int], reason: str) -> None:
    ids = [5] * completion if isinstance(completion, int) else completion
    spec = spec_of(SamplingSpec(max_tokens=8), completion=np.array(ids, dtype=np.int32))
    async with Driver(tiny_model(), ENGINE) as driver:
        assert driver.engine.add(spec).reason == reason
