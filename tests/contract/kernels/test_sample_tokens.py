"""Every sampler against an obvious twin: same thresholds, same noise, same token."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.kernels import dispatch
from finback.kernels.sample_tokens import SampledTokens, SamplingTensors
from finback.kernels.sample_tokens.noise import gumbel

Sampler = Callable[[torch.Tensor, SamplingTensors], SampledTokens]


def _samplers() -> list[Any]:
    found = dispatch.implementations("sample_tokens")
    return [
        pytest.param(item.load(), id=item.backend)
        for item in found
        if item.obstacle("cpu", "fast") is None
    ]


@pytest.fixture(params=_samplers())
def sample(request: pytest.FixtureRequest) -> Sampler:
    sampler: Sampler = request.param
    return sampler


def make(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1,
    position: int = 0,
    **rest: Any,
) -> SamplingTensors:
    """The same parameters in all rows but the position, which counts up."""
    return SamplingTensors(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seed=torch.full((num_rows,), seed, dtype=torch.int64),
        position=torch.arange(position, position + num_rows),
        is_all_greedy=temperature == 0.0,
        has_filters=top_k > 0 or top_p < 1.0 or min_p > 0.0,
        **rest,
    )


def kept_by_twin(scaled: np.ndarray[Any, Any], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters by sorting everything, in float64."""
    order = np.argsort(-scaled, kind="stable")
    limit = -np.inf
    if 0 < top_k < len(scaled):
        limit = scaled[order[top_k - 1]]
    if top_p < 1.0:
        kept = [i for i in order if scaled[i] >= limit]
        weights = np.exp(scaled[kept].astype(np.float64) - scaled[order[0]])
        mass = np.cumsum(weights)
        limit = max(limit, scaled[kept[int(np.searchsorted(mass, top_p * mass[-1]))]])
    if min_p > 0.0:
        limit = max(limit, scaled[order[0]] + np.log(min_p))
    return {int(i) for i in order if scaled[i] >= limit}


@given(
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 2**31),
    vocab_size=st.integers(2, 300),
    temperature=st.sampled_from([0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.99, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_filters_and_noise_equal_the_twin(
    seed: int,
    position: int,
    vocab_size: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    data: st.DataObject,
) -> None:
    spread = data.draw(st.sampled_from([0.5, 4.0, 30.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    logits = torch.from_numpy((rng.normal(size=(1, vocab_size)) * spread).astype(np.float32))
    params = make(
        1,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=position,
    )
    scaled = (logits[0] / torch.tensor(temperature)).numpy()
    kept = kept_by_twin(scaled, top_k, top_p, min_p)
    noisy = torch.from_numpy(scaled) + gumbel(seed, position, torch.arange(vocab_size))
    best = sorted(kept, key=lambda i: -float(noisy[i]))
    for param in _samplers():
        token = int(param.values[0](logits, params).token_ids[0])
        # The sum of a top-p set may round to either side of its border.
        near = [i for i in range(vocab_size) if float(noisy[i]) >= float(noisy[best[0]]) - 1e-4]
        assert token in near, (token, best[:3])


def test_greedy_takes_the_lowest_of_equals(sample: Sampler) -> None:
    logits = torch.zeros(3, 77)
    logits[1, 50] = logits[1, 70] = 2.0
    logits[2, 76] = 1.0
    assert sample(logits, make(3, temperature=0.0)).token_ids.tolist() == [0, 50, 76]


def test_rows_do_not_know_each_other(sample: Sampler) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 1000, generator=generator) * 3
    params = make(9, temperature=0.9, top_p=0.9, position=20)
    together = sample(logits, params).token_ids.tolist()
    alone = [
        int(
            sample(
                logits[i : i + 1], make(1, temperature=0.9, top_p=0.9, position=20 + i)
            ).token_ids[0]
        )
        for i in range(9)
    ]
    assert together == alone


def test_mixed_rows(sample: Sampler) -> None:
    """Greedy and sampled rows in one call; strided logits as a padded head gives them."""
    wide = torch.randn(4, 1024, generator=torch.Generator().manual_seed(4))
    params = make(4, temperature=1.0, top_k=5)
    params.temperature[2] = 0.0
    found = sample(wide[:, :1001], params)
    assert int(found.token_ids[2]) == int(wide[2, :1001].argmax())
    assert found.is_finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_told(bad: float, temperature: float, sample: Sampler) -> None:
    logits = torch.randn(3, 50)
    logits[1, 49] = bad
    found = sample(logits, make(3, temperature=temperature))
    assert found.is_finite.tolist() == [True, False, True]


def test_nothing_allowed_is_told(sample: Sampler) -> None:
    bitmask = torch.full((2, 2), -1, dtype=torch.int32)
    bitmask[1] = 0
    assert sample(torch.randn(2, 50), make(2, bitmask=bitmask)).is_finite.tolist() == [True, False]


def test_bitmask_and_bias(sample: Sampler) -> None:
    logits = torch.zeros(2, 70)
    bitmask = torch.zeros(2, 3, dtype=torch.int32)
    bitmask[:, 2] = 1 << 4  # token 68 alone
    assert sample(logits, make(2, bitmask=bitmask)).token_ids.tolist() == [68, 68]
    params = make(
        2,
        temperature=0.0,
        bias_rows=torch.tensor([0, 1, 1]),
        bias_ids=torch.tensor([9, 9, 9]),
        bias_values=torch.tensor([5.0, 5.0, float("-inf")]),
    )
    assert sample(logits, params).token_ids.tolist() == [9, 0]
    assert not logits.any()  # the model's logits stay as they were


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_mask_for_each_row_is_as_one_row_at_a_time(sample: Sampler, temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    num_rows, size = 9, 200
    logits = torch.randn(num_rows, size, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (num_rows, 7), generator=generator, dtype=torch.int64)
    bitmask = (bitmask & torch.randint(-(2**31), 2**31, (num_rows, 7), generator=generator)).int()
    together = sample(logits, make(num_rows, temperature=temperature, bitmask=bitmask)).token_ids
    for row, token in enumerate(together.tolist()):
        own = bitmask[row : row + 1]
        params = make(1, temperature=temperature, position=row, bitmask=own)
        assert sample(logits[row : row + 1], params).token_ids.tolist() == [token]
        assert int(own[0, token // 32]) >> (token % 32) & 1


def test_penalties(sample: Sampler) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0], [2.0, 1.9, -1.0]])
    counts = torch.tensor([[3, 0, 0], [0, 0, 0]], dtype=torch.int32)
    prompt = torch.tensor([[False, True, False], [True, False, False]])
    ones, zeros = torch.ones(2), torch.zeros(2)
    base: dict[str, Any] = {"temperature": 0.0, "output_counts": counts, "prompt_mask": prompt}
    # Repetition looks at prompt and completion: rows become [1, .95, -1] and [1, 1.9, -1].
    params = make(
        2, **base, repetition_penalty=2 * ones, presence_penalty=zeros, frequency_penalty=zeros
    )
    assert sample(logits, params).token_ids.tolist() == [0, 1]
    # Presence and frequency look at the completion only: [2 - 0.5 - 3 * 0.2, ...].
    params = make(
        2,
        **base,
        repetition_penalty=ones,
        presence_penalty=0.5 * ones,
        frequency_penalty=0.2 * ones,
    )
    assert sample(logits, params).token_ids.tolist() == [1, 0]


def test_logprobs_are_of_the_raw_distribution(sample: Sampler) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(5))
    params = make(3, temperature=0.5, top_k=2, num_logprobs=4)
    found = sample(logits, params)
    wanted = logits.log_softmax(-1)
    assert (
        found.logprobs is not None and found.top_ids is not None and found.top_logprobs is not None
    )
    own = wanted.gather(1, found.token_ids[:, None].long())[:, 0]
    torch.testing.assert_close(found.logprobs, own)
    values, ids = wanted.topk(4)
    torch.testing.assert_close(found.top_logprobs, values)
    assert found.top_ids.tolist() == ids.tolist()
    empty = sample(logits, make(3, num_logprobs=0))
    assert empty.top_ids is not None and empty.top_ids.shape == (3, 0)


def test_distribution(sample: Sampler) -> None:
    """Chi-square of 20,000 draws over positions, 11 categories: below the 99.99 % point (35.6)."""
    logits = torch.linspace(-2.0, 1.5, 11)
    num_draws = 20_000
    found = sample(logits.expand(num_draws, 11).contiguous(), make(num_draws, seed=12345))
    counts = torch.bincount(found.token_ids.long(), minlength=11).double()
    expected = logits.double().softmax(0) * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 35.6


def test_distribution_over_seeds_and_token_ids() -> None:
    """Uniform logits over 64 tokens, one draw a seed: 63 degrees of freedom, 99.99 % point 114."""
    ids = torch.arange(64)
    counts = torch.zeros(64)
    for seed in range(6400):
        counts[int(gumbel(seed, 7, ids).argmax())] += 1
    assert float(((counts - 100) ** 2 / 100).sum()) < 114
