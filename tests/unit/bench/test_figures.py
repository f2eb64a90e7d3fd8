"""Figures of outcomes that are easy to check by hand, and statistics against numpy."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.bench import figures, stats, targets
from finback.shared.bench.crew import Run
from finback.shared.bench.outcomes import Outcome
from finback.shared.bench.stats import Spread
from finback.shared.bench.workloads import Request
from finback.shared.errors import ConfigError


def outcome(index: int = 0, **given: object) -> Outcome:
    """Due at 1 s, first token at 1.5 s, then one every 0.1 s, five in all."""
    values: dict[str, object] = {
        "index": index,
        "due_s": 1.0,
        "sent_s": 1.2,
        "first_s": 1.5,
        "last_s": 1.9,
        "gaps_s": (0.1, 0.1, 0.1, 0.1),
        "num_wanted": 5,
        "num_tokens": 5,
        "num_prompt_tokens": 7,
        "num_cached_tokens": 0,
    }
    return Outcome(**(values | given))  # type: ignore[arg-type]  # a table of fields


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: int) -> None:
    wanted = float(np.percentile(values, percent))
    assert stats.percentile(sorted(values), percent) == pytest.approx(wanted, abs=1e-6)


def test_latencies_count_from_the_due_time() -> None:
    one = outcome()
    assert one.ttft_s == pytest.approx(0.5)
    assert one.tpot_s == pytest.approx(0.1)
    assert one.e2e_s == pytest.approx(0.9)
    single = outcome(num_tokens=1, num_wanted=1, gaps_s=(), last_s=1.5)
    assert single.tpot_s is None
    assert single.is_whole


def test_an_answer_that_is_short_failed_or_cut_is_not_whole() -> None:
    assert outcome().is_whole
    assert not outcome(num_tokens=4).is_whole
    assert not outcome(error="lost").is_whole
    assert not outcome(is_cut=True).is_whole


def test_throughput_is_tokens_over_the_time_to_the_last_of_them() -> None:
    run = Run(
        elapsed_s=2.5, outcomes=[outcome(0), outcome(1, last_s=2.0)], token_counts=Counter(a=4, b=4)
    )
    requests = [Request(prompt=tuple(range(7)), num_tokens=5)] * 2
    found = figures.figures_of(run, figures.Context(requests=requests))
    assert found["elapsed_s"] == 2.0
    assert found["output_tokens_per_s"] == 5.0
    assert found["prompt_tokens_per_s"] == 7.0
    assert found["requests_per_s"] == 1.0
    assert found["entropy"] == {"empirical_bits": 1.0, "num_tokens": 8, "num_distinct": 2}
    assert "goodput" not in found
    assert "limit" not in found


def test_a_whole_run_has_no_latencies() -> None:
    run = Run(elapsed_s=2.0, outcomes=[outcome()])
    context = figures.Context(requests=[Request(prompt=(1,), num_tokens=5)], has_times=False)
    assert "ttft_s" not in figures.figures_of(run, context)


def test_goodput_counts_requests_that_met_every_target() -> None:
    wanted = targets.parse("ttft=600ms, tpot=0.2s")
    slow, refused = outcome(1, first_s=1.7), outcome(2, error="full", is_refused=True)
    found = targets.goodput([outcome(0), slow, refused, outcome(3)], wanted, 2.0)
    assert found == {"requests_per_s": 1.0, "output_tokens_per_s": 5.0, "share": 0.5}
    strict = targets.parse("itl=50ms")
    assert not strict.are_met(outcome())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "at least one"),
        ("ttft=5", "ttft needs a time"),
        ("ttft=-5ms", "ttft needs a time"),
        ("ttft=0ms", "ttft needs a time"),
        ("speed=5ms", "'speed' is none of ttft, tpot, itl, e2e"),
    ],
)
def test_bad_targets_are_named(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        targets.parse(text)


def test_medians_are_over_the_repetitions_that_have_the_figure() -> None:
    found = figures.medians([{"a": 1, "b": {"c": 5.0}}, {"a": 3}, {"a": 2, "b": None}])
    assert found == {
        "a": Spread(median=2, low=1, high=3, num=3),
        "b.c": Spread(median=5.0, low=5.0, high=5.0, num=1),
    }
    assert found["a"].relative == 1.0
    assert found["a"].overlaps(Spread(median=4, low=3, high=5, num=2))
    assert not found["a"].overlaps(Spread(median=4, low=3.5, high=5, num=2))


@given(st.integers(0, 5), st.integers(1, 6), st.integers(0, 40))
def test_cached_tokens_are_shared_out_whole(shared: int, more: int, total: int) -> None:
    requests = [Request(prompt=tuple(range(shared + more)), num_tokens=1, num_shared=shared)] * 4
    outcomes = [outcome(at) for at in range(4)]
    found = figures.share_out_cached(outcomes, requests, total)
    assert sum(found) == min(total, 4 * (shared + more - 1)) or shared + more == shared
    assert all(0 <= count <= shared + more - 1 for count in found)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_entropy_is_numpys(counts: list[int]) -> None:
    shares = np.array(counts) / sum(counts)
    wanted = float(-(shares * np.log2(shares)).sum())
    assert stats.entropy_bits(dict(enumerate(counts))) == pytest.approx(wanted, abs=1e-9)
