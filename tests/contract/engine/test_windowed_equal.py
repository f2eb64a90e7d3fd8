"""Every way to run a windowed model gives the bits of the plain one (deterministic mode).

Hypothesis draws pools that are too small, chunks, drafts, sampling, prompts that begin alike, snapshots
that get lost in between, answers begun elsewhere; compared with one sequence at a time, nothing reused.
"""

import asyncio
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, given, settings

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec, TokenIds
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, Driver, generate
from support.windowed import windowed_model

PREFIX = np.random.default_rng(7).integers(4, 96, 24).astype(np.int32)
MAX_LEN = 72


@st.composite
def spec_lists(draw: st.DrawFn) -> list[SequenceSpec]:
    specs = []
    for index in range(draw(st.integers(1, 4))):
        own = draw(st.lists(st.integers(0, 95), min_size=1, max_size=16))
        shared = draw(st.sampled_from([0, 8, 17, 24]))
        specs.append(
            SequenceSpec(
                key=(f"r{index}", 0),
                attempt=1,
                token_ids=np.append(PREFIX[:shared], np.array(own)).astype(np.int32),
                completion=np.array(draw(st.sampled_from([[], [5, 9, 2]])), dtype=np.int32),
                sampling=SamplingSpec(
                    temperature=draw(st.sampled_from([0.0, 1.2])),
                    frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
                    max_tokens=draw(st.integers(4, 24)),
                    num_logprobs=0,
                ),
                seed=draw(st.integers(0, 3)),
                drafting=draw(st.booleans()),
            )
        )
    return specs


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    num_seqs = draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([4, 8]))
    least = -(-MAX_LEN // block_size)
    return EngineConfig(
        num_blocks=draw(st.sampled_from([least, least + 4, 3 * least])),
        block_size=block_size,
        max_model_len=MAX_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + draw(st.integers(0, 24)),
        max_draft_tokens=draw(st.sampled_from([0, 1, 3])),
        overlap_below_ms=draw(st.sampled_from([0.0, 50.0])),
        state_snapshot_bytes=draw(st.sampled_from([0, 40_000, 1 << 20])),
        mode="deterministic",
        num_threads=1,
    )


def _told(completion: Completion) -> tuple[list[int], list[float]]:
    return completion.tokens, [item.logprob for item in completion.logprobs]


def _plain(spec: SequenceSpec) -> Completion:
    """Alone, whole, without reuse: what `Driver` tells begins behind the known completion."""
    config = EngineConfig(
        num_blocks=20,
        block_size=8,
        max_model_len=MAX_LEN,
        max_num_seqs=1,
        max_num_batched_tokens=128,
        max_draft_tokens=0,
        prefix_caching=False,
        mode="deterministic",
        num_threads=1,
    )
    return generate(windowed_model("deterministic"), config, [replace(spec, drafting=False)])[0]


@given(specs=spec_lists(), config=configs(), wrong=st.integers(0, 5), is_lost=st.booleans())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_all_ways_are_one(
    specs: list[SequenceSpec], config: EngineConfig, wrong: int, is_lost: bool
) -> None:
    plain = {spec.key: _plain(spec) for spec in specs}

    def guess(spec: SequenceSpec, known: TokenIds, _position: int) -> TokenIds:
        coming = plain[spec.key[0].removesuffix("'"), 0].tokens[known.size : known.size + 5]
        drafts = [(t + (i >= wrong)) % 96 for i, t in enumerate(coming)]
        return np.array(drafts, dtype=np.int32)

    async def main() -> None:
        async with Driver(windowed_model("deterministic"), config, drafter=guess) as driver:
            first = await driver.run(specs)
            if is_lost:
                assert driver.engine.states is not None
                driver.engine.states.clear()
            again = [replace(spec, key=(f"{spec.key[0]}'", 0)) for spec in specs]
            for found in (first, await driver.run(again)):
                for spec, completion in zip(specs, found, strict=True):
                    assert _told(completion) == _told(plain[spec.key])
            driver.engine.check_integrity()
            await driver.until_free()

    asyncio.run(main())
