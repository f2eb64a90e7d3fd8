"""Deterministic mode: whatever an answer shares the engine with, the same tokens and logprobs.

Each answer alone, in an engine that does nothing else, is the truth; every other way must give the
same bits: tokens, their logprobs and those of the likeliest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finback.shared.offline.llm import LLM
from support.tiny_llm import (
    VOCAB_SIZE,
    mixed_params,
    save_tiny,
    tiny_llm,
    token_prompts,
    told,
)

pytestmark = [pytest.mark.slow]

COUNT = 16
BLOCK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, what it is asked, and the truth about it."""

    make: Callable[..., LLM]
    prompts: list[list[int]]
    max_tokens: int
    block_bytes: int
    alone: list[object]

    def llm(self, **options: Any) -> LLM:
        return self.make(deterministic=True, block_size=BLOCK, **options)

    def run(self, llm: LLM) -> list[object]:
        return told(llm.generate(self.prompts, mixed_params(COUNT, self.max_tokens)))


def _case(make: Callable[..., LLM], prompts: list[list[int]], max_tokens: int) -> Case:
    params = mixed_params(COUNT, max_tokens)
    options: dict[str, Any] = {"deterministic": True, "block_size": BLOCK, "max_num_seqs": 1}
    with make(**options, enable_prefix_cache=False) as llm:
        completions = [llm.generate(prompts[at], params[at])[0] for at in range(COUNT)]
        alone = [(at, *told([found])[0][1:]) for at, found in enumerate(completions)]  # type: ignore[index]  # a tuple
        block_bytes = llm.cache_spec.block_bytes
    return Case(
        make=make, prompts=prompts, max_tokens=max_tokens, block_bytes=block_bytes, alone=[*alone]
    )


def _embedded(**options: Any) -> LLM:
    return LLM(**{"kv_pool_bytes": 2**26, "max_model_len": 512, **options})


@pytest.fixture(scope="module", params=["tiny", "embedded"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    if request.param == "tiny":
        path: Path = save_tiny(tmp_path_factory.mktemp("tiny"))
        prompts = token_prompts(COUNT, low=3, high=VOCAB_SIZE, num_shared=40, lengths=(9, 30, 17))
        yield _case(lambda **options: tiny_llm(path, **options), prompts, 40)
    else:
        prompts = token_prompts(COUNT, low=100, high=40000, num_shared=33, lengths=(25, 13, 4))
        yield _case(_embedded, prompts, 10)


def test_answers_differ_and_have_logprobs(case: Case) -> None:
    token_ids = {found[1] for found in case.alone}  # type: ignore[index]  # a tuple
    assert len(token_ids) > COUNT // 2
    assert all(len(found[1]) == len(found[2]) == case.max_tokens for found in case.alone)  # type: ignore[index]  # a tuple


def test_a_batch_of_sixteen_is_alone(case: Case) -> None:
    with case.llm(max_num_seqs=COUNT, enable_prefix_cache=False) as llm:
        assert case.run(llm) == case.alone


def test_chunks_of_sixteen_rows_are_alone(case: Case) -> None:
    with case.llm(max_num_batched_tokens=16, enable_prefix_cache=False) as llm:
        assert case.run(llm) == case.alone
        assert llm.stats().num_steps > sum(map(len, case.prompts)) // 16


def test_preempted_is_alone(case: Case) -> None:
    longest = max(map(len, case.prompts)) + case.max_tokens
    num_blocks = -(-longest // BLOCK) + 4
    pool = {"kv_pool_bytes": num_blocks * case.block_bytes, "max_model_len": longest + 1}
    with case.llm(max_num_seqs=8, enable_prefix_cache=False, **pool) as llm:
        assert case.run(llm) == case.alone
        assert llm.stats().num_preemptions > 0


def test_prefix_hits_are_alone(case: Case) -> None:
    with case.llm(max_num_seqs=COUNT) as llm:
        assert case.run(llm) == case.alone
        before = llm.stats().num_cached_tokens
        assert case.run(llm) == case.alone
        assert llm.stats().num_cached_tokens - before >= COUNT * BLOCK
        llm.reset_prefix_cache()
        assert case.run(llm) == case.alone


def test_drafted_is_alone(case: Case) -> None:
    with case.llm(
        max_num_seqs=4, max_draft_tokens=4, num_threads=1
    ) as llm:  # nor do threads matter
        assert case.run(llm) == case.alone
        stats = llm.stats()
        assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
