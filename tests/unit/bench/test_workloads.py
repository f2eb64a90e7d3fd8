"""The lists are the published ones to the letter; scaling and marking keep their shape."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.bench import chat_load, workloads
from finback.shared.bench.workloads import Request
from finback.shared.errors import ConfigError

# SHA-256 over the JSON of [[prompt ids, tokens], ...]: the lists that other engines were timed on.
DIGESTS = {
    "latency": "364deaf18a40353399a9a585e86864d9ae9206273a9914495517d8b8c6350b36",
    "nano": "75d800f5165d3a1549637b364fa0f356219f471a5409439d7aca415287543f07",
    "prefill": "04055ad9211dea89adcf2a267089d187ee90c89d12be93d5aa52275be9c5922d",
    "decode": "4f8a854bec1be41267f953282fbce5a42f8cb68e8c0d6b5cdd3d6d7f421fd782",
    "agent": "a1505e2da8f14d36c726ad7e32ab92bcc9525edd03e18fb9d444623ea13e4616",
}


@pytest.mark.parametrize("name", workloads.FIXED)
def test_the_lists_are_the_published_ones(name: str) -> None:
    for vocab_size in (49_152, 151_936):
        requests = workloads.workload(name, vocab_size)
        assert workloads.digest(requests) == DIGESTS[name]
        assert len(requests) == workloads.SIZES[name]


def test_ids_stay_below_a_small_vocabulary() -> None:
    requests = workloads.workload("decode", 300)
    ids = {token for item in requests for token in item.prompt}
    assert (min(ids), max(ids)) == (10, 299)
    with pytest.raises(ConfigError, match="vocab_size must be above 10"):
        workloads.workload("decode", 8)
    with pytest.raises(ConfigError, match="workload must be one of latency"):
        workloads.workload("chat", 300)


@given(st.floats(0.01, 1.0))
def test_scaling_keeps_what_is_shared(scale: float) -> None:
    whole = [
        Request(prompt=(*range(50), 100 + at, 200 + at), num_tokens=64, num_shared=50)
        for at in range(3)
    ]
    some = workloads.scaled(whole, scale)
    shared = some[0].num_shared
    assert shared == round(50 * scale)
    assert len({item.prompt[:shared] for item in some}) == 1
    assert len({item.prompt for item in some}) == 3
    assert {item.num_tokens for item in some} == {max(1, round(64 * scale))}


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_mark_changes_every_prefix_and_no_length(prompts: list[list[int]]) -> None:
    requests = [Request(prompt=tuple(ids), num_tokens=1) for ids in prompts]
    found = workloads.marked(requests, (90, 91))
    assert [len(item.prompt) for item in found] == [len(ids) for ids in prompts]
    assert all(item.prompt[0] == 90 for item in found)
    assert all(a.prompt[2:] == b.prompt[2:] for a, b in zip(found, requests, strict=True))


def test_chat_lengths_have_the_means_that_were_counted() -> None:
    draw = random.Random(5)
    pairs = [chat_load.draw_lengths(draw) for _ in range(20_000)]
    prompt = sum(a for a, _ in pairs) / len(pairs)
    answer = sum(b for _, b in pairs) / len(pairs)
    assert prompt == pytest.approx(chat_load.MEAN_PROMPT_TOKENS, rel=0.03)
    assert answer == pytest.approx(chat_load.MEAN_ANSWER_TOKENS, rel=0.03)
    assert all(4 <= a <= 1024 and b >= 4 and a + b <= 2048 for a, b in pairs)


def test_chat_arrivals_are_poisson_and_requests_do_not_depend_on_the_rate() -> None:
    def load(rate_per_s: float) -> list[Request]:
        return chat_load.chat_requests(
            rate_per_s=rate_per_s, vocab_size=49_152, seed=3, num_requests=400
        )

    slow, fast = load(2.0), load(8.0)
    assert [item.prompt for item in slow] == [item.prompt for item in fast]
    assert [a.due_s / b.due_s for a, b in zip(slow[1:], fast[1:], strict=True)] == pytest.approx(
        [4.0] * 399
    )
    gaps = [b.due_s - a.due_s for a, b in itertools.pairwise(slow)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.5, rel=0.15)
    assert deviation / mean == pytest.approx(1.0, rel=0.2)  # as of an exponential


def test_chat_ends_at_the_duration_or_the_number() -> None:
    def load(**limits: float) -> list[Request]:
        return chat_load.chat_requests(rate_per_s=10.0, vocab_size=49_152, seed=0, **limits)  # type: ignore[arg-type]  # one of two limits

    assert all(item.due_s < 3 for item in load(duration_s=3.0))
    assert len(load(num_requests=7)) == 7
    with pytest.raises(ConfigError, match="num_requests or duration_s"):
        load()
