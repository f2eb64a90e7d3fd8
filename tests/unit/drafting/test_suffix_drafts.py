"""Drafts against a twin that compares every suffix with every place, one token at a time."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared.drafting.suffix_drafts import MatchPolicy, draft, find_match

TEXTS = st.lists(st.integers(0, 3), max_size=60)
POLICIES = st.tuples(st.integers(1, 4), st.integers(0, 6), st.integers(1, 5)).map(
    lambda drawn: MatchPolicy(
        min_match=drawn[0], max_match=drawn[0] + drawn[1], max_candidates=drawn[2]
    )
)


def twin_match(text: list[int], policy: MatchPolicy) -> int | None:
    def length_at(end: int) -> int:
        length = 0
        while length < min(end, policy.max_match) and text[end - length - 1] == text[-length - 1]:
            length += 1
        return length

    ends = [end for end in range(1, len(text)) if length_at(end) >= policy.min_match]
    latest = ends[-policy.max_candidates :]
    return max(latest, key=lambda end: (length_at(end), end), default=None)


def twin_draft(text: list[int], num_draft_tokens: int, policy: MatchPolicy) -> list[int]:
    found = twin_match(text, policy)
    if found is None:
        return []
    longer = list(text)
    for index in range(num_draft_tokens):
        longer.append(longer[found + index])
    return longer[len(text) :]


@settings(max_examples=500)
@given(text=TEXTS, num_draft_tokens=st.integers(0, 12), policy=POLICIES)
def test_drafts_are_the_twins(text: list[int], num_draft_tokens: int, policy: MatchPolicy) -> None:
    token_ids = np.array(text, np.int32)
    assert find_match(token_ids, policy) == twin_match(text, policy)
    assert draft(token_ids, num_draft_tokens, policy).tolist() == twin_draft(
        text, num_draft_tokens, policy
    )


def test_the_longest_match_wins_then_the_latest() -> None:
    policy = MatchPolicy(min_match=2, max_match=4)
    text = np.array([1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 1, 2, 3], np.int32)
    assert draft(text, 2, policy).tolist() == [50, 9]
    assert draft(text[text != 1], 1, policy).tolist() == [70]


def test_no_guess_from_a_short_match() -> None:
    text = np.array([5, 6, 7, 8, 5, 6], np.int32)
    assert draft(text, 4, MatchPolicy(min_match=3)).tolist() == []
    assert draft(text, 2, MatchPolicy(min_match=2)).tolist() == [7, 8]


def test_a_loop_is_drafted_beyond_its_end() -> None:
    text = np.array([1, 2, 1, 2, 1, 2], np.int32)
    assert draft(text, 5, MatchPolicy()).tolist() == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(("low", "high"), [(0, 3), (4, 3)])
def test_impossible_policies_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="min_match"):
        MatchPolicy(min_match=low, max_match=high)


@pytest.mark.parametrize("kind", ["words", "one-token", "period"])
def test_it_is_quick(kind: str) -> None:
    """Sixteen rows of 4,096 tokens; under 0.5 ms on an idle core, the limit is for a loaded one."""
    rng = np.random.default_rng(1)
    rows = {
        "words": rng.zipf(1.3, (16, 4096)).clip(0, 49_000),
        "one-token": np.full((16, 4096), 7),
        "period": np.tile(np.arange(64), (16, 64)),
    }[kind].astype(np.int32)
    best = min(_timed(rows) for _ in range(20))
    assert best < 0.005


def _timed(rows: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> float:
    started = time.perf_counter()
    for row in rows:
        draft(row, 9, MatchPolicy())
    return time.perf_counter() - started
