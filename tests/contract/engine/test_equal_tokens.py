"""Every way to run a sequence gives the tokens of the obvious way (deterministic mode).

Paged = unpaged, chunked = one-shot, preempted = undisturbed, drafted = undrafted, batch = alone:
hypothesis draws pools that are too small, chunks, drafts that are right, wrong or late, sampling
with penalties, and compares with `slow_engine`, which has none of this.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings

from finback.kernels.decode_attention import SharedPrefixes
from finback.shared.engine import prefix_groups
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec, TokenIds
from finback.shared.models.causal_lm import CausalLM
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, Drafter, Driver, generate
from support.slow_engine import slow_completion
from support.tiny_model import CONFIG, check_shared, tiny_model, tiny_resident, tiny_stack

EOS = (0, 1, 2, 3)
PREFIX = np.random.default_rng(7).integers(4, CONFIG.vocab_size, 24).astype(np.int32)


@st.composite
def samplings(draw: st.DrawFn) -> SamplingSpec:
    max_tokens = draw(st.integers(1, 24))
    return SamplingSpec(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.3])),
        top_k=draw(st.sampled_from([0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.05])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.7])),
        logit_bias=draw(st.sampled_from([None, None, {7: 3.0, 8: -100.0}])),
        stop_token_ids=draw(st.sampled_from([(), (20, 21, 22, 23)])),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, min(4, max_tokens))),
        max_tokens=max_tokens,
    )


@st.composite
def spec_lists(draw: st.DrawFn) -> list[SequenceSpec]:
    specs = []
    for index in range(draw(st.integers(1, 5))):
        own = draw(st.lists(st.integers(0, CONFIG.vocab_size - 1), min_size=1, max_size=20))
        shared = draw(st.integers(0, PREFIX.size))
        specs.append(
            SequenceSpec(
                key=(f"r{index}", 0),
                attempt=1,
                token_ids=np.append(PREFIX[:shared], np.array(own)).astype(np.int32),
                sampling=draw(samplings()),
                seed=draw(st.integers(0, 2**63 - 1)),
                drafting=draw(st.booleans()),
            )
        )
    return specs


@st.composite
def configs(draw: st.DrawFn, block_sizes: tuple[int, ...]) -> EngineConfig:
    block_size = draw(st.sampled_from(block_sizes))
    max_model_len = draw(st.sampled_from([48, 80]))
    least = -(-max_model_len // block_size)
    max_num_seqs = draw(st.integers(1, 4))
    return EngineConfig(
        num_blocks=least + draw(st.integers(0, least)),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 3, 16, 200])),
        max_draft_tokens=draw(st.integers(0, 4)),
        eos_token_ids=EOS,
        mode="deterministic",
        num_threads=1,
        overlap_below_ms=draw(st.sampled_from([0.0, 1e9])),
        prefix_caching=draw(st.booleans()),
    )


def _guesser(expected: dict[Any, list[int]], quality: int) -> Drafter:
    """Guesses of known truth, of which every `quality`-th token is wrong."""

    def guess(spec: SequenceSpec, _known: TokenIds, position: int) -> TokenIds:
        start = position - spec.token_ids.size
        tokens = list(expected[spec.key][start : start + 9])
        for index in range(len(tokens)):
            if (start + index) % quality == quality - 1:
                tokens[index] = (tokens[index] + 1) % CONFIG.vocab_size
        return np.array(tokens, dtype=np.int32)

    return guess


def _check(specs: Sequence[SequenceSpec], got: list[Completion], expected: dict[Any, Any]) -> None:
    for spec, completion in zip(specs, got, strict=True):
        tokens, reason = expected[spec.key]
        assert completion.tokens == tokens
        end = completion.end
        assert end is not None
        assert (end.finish_reason, end.num_completion_tokens) == (reason, len(tokens))
        assert end.num_steps + end.num_accepted_tokens == len(tokens)
        assert end.stop_token_id == (tokens[-1] if reason == "stop" else None)
        if end.num_draft_tokens:
            event("drafts verified")
        if end.num_accepted_tokens:
            event("drafts accepted")


@pytest.mark.parametrize(
    ("model", "block_sizes"),
    [(tiny_model, (4, 8, 16)), (tiny_stack, (32, 64)), (tiny_resident, (4, 8, 16))],
    ids=["op by op", "compiled", "resident"],
)
@given(data=st.data(), specs=spec_lists(), quality=st.integers(1, 6))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_way_gives_the_same_tokens(
    model: Callable[[], CausalLM],
    block_sizes: tuple[int, ...],
    data: st.DataObject,
    specs: list[SequenceSpec],
    quality: int,
) -> None:
    config = data.draw(configs(block_sizes))
    expected = {
        spec.key: slow_completion(
            model(), spec, max_model_len=config.max_model_len, eos_token_ids=EOS
        )
        for spec in specs
    }
    drafter = _guesser({key: tokens for key, (tokens, _) in expected.items()}, quality)
    _check(specs, generate(model(), config, specs, drafter=drafter), expected)


@pytest.mark.parametrize("make_model", [tiny_model, tiny_resident])
@pytest.mark.parametrize("overlap_below_ms", [0.0, 1e9])
def test_perfect_drafts_save_steps(
    overlap_below_ms: float, make_model: Callable[[], CausalLM]
) -> None:
    spec = SequenceSpec(
        key=("r", 0),
        attempt=1,
        token_ids=PREFIX,
        sampling=SamplingSpec(temperature=0.9, max_tokens=40, frequency_penalty=0.5),
        seed=5,
        drafting=True,
    )
    config = EngineConfig(
        num_blocks=20,
        block_size=8,
        max_num_seqs=2,
        mode="deterministic",
        num_threads=1,
        overlap_below_ms=overlap_below_ms,
    )
    model = make_model()
    expected, _ = slow_completion(model, spec, max_model_len=128, eos_token_ids=())
    drafter = _guesser({spec.key: expected}, 1000)
    (completion,) = generate(model, config, [spec], drafter=drafter)
    assert completion.tokens == expected
    assert completion.end is not None
    assert completion.end.num_steps < 20


def test_sequences_that_begin_alike_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "MIN_SHARED_TOKENS", 16)
    grouped = []

    def check(shared: SharedPrefixes, *others: Any) -> None:
        check_shared(shared, *others)
        grouped.append(int(shared.start_blocks.count_nonzero()))

    monkeypatch.setattr("support.tiny_model.check_shared", check)
    config = EngineConfig(
        num_blocks=40, block_size=8, max_num_seqs=4, mode="deterministic", num_threads=1
    )
    specs = [
        SequenceSpec(
            key=(f"r{index}", 0),
            attempt=1,
            token_ids=np.append(PREFIX, np.arange(4, 5 + index)).astype(np.int32),
            sampling=SamplingSpec(temperature=0.9, max_tokens=12 + index, ignore_eos=True),
            seed=index,
        )
        for index in range(4)
    ]

    async def main() -> list[Completion]:
        async with Driver(tiny_resident(), config) as driver:
            return await driver.run(specs[:1]) + await driver.run(specs[1:])

    for spec, completion in zip(specs, asyncio.run(main()), strict=True):
        expected, _ = slow_completion(tiny_model(), spec, max_model_len=128, eos_token_ids=())
        assert completion.tokens == expected
    assert max(grouped) == 3
