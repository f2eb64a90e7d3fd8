"""Drafting turns itself off where it does not pay, and comes back when it does."""

from hypothesis import given
from hypothesis import strategies as st

from finback.shared.drafting.draft_policy import (
    DraftHistory,
    DraftPolicy,
    after_empty,
    after_step,
    after_verify,
    break_even,
    should_ask,
)
from finback.shared.engine.step_times import StepTimes

POLICY = DraftPolicy()


def run(history: DraftHistory, num_steps: int, num_accepted: int) -> tuple[DraftHistory, int]:
    """Steps where every draft that is asked for has `num_accepted` of 4 tokens accepted."""
    num_drafted_steps = 0
    for _ in range(num_steps):
        asks = should_ask(POLICY, history, 1)
        history = after_step(history)
        if asks:
            num_drafted_steps += 1
            history = after_verify(POLICY, history, 4, num_accepted)
    return history, num_drafted_steps


def test_good_drafts_go_on() -> None:
    _, drafted = run(DraftHistory(), 100, 3)
    assert drafted == 100


def test_bad_drafts_stop_but_are_probed() -> None:
    history, drafted = run(DraftHistory(), 400, 0)
    assert 5 <= drafted <= 20
    # The text starts to repeat itself: the next probe brings drafting back at once.
    _, drafted = run(history, 200, 4)
    assert drafted >= 200 - POLICY.max_probe_steps


def test_big_batches_are_not_drafted() -> None:
    assert should_ask(POLICY, DraftHistory(), 1)
    assert not should_ask(POLICY, DraftHistory(), POLICY.max_rows)


def test_empty_answers_thin_out_the_questions() -> None:
    history = DraftHistory()
    num_asked = 0
    for _ in range(200):
        if should_ask(POLICY, history, 1):
            num_asked += 1
            history = after_empty(POLICY, history)
        history = after_step(history)
    assert 200 // (POLICY.max_idle_steps + 1) <= num_asked <= 80


def test_break_even_comes_from_measured_steps() -> None:
    times = StepTimes()
    assert break_even(times.table(), 1, 4) is None
    for _ in range(10):
        times.record(1, 10.0)
        times.record(5, 18.0)
    gain = break_even(times.table(), 1, 4)
    assert gain is not None and abs(gain - 0.8) < 1e-9
    for _ in range(100):
        times.record(5, 90.0)
    assert break_even(times.table(), 1, 4) == 2.0
    assert break_even(times.table(), 3, 4) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=200))
def test_waits_are_bounded(steps: list[tuple[int, int]]) -> None:
    history = DraftHistory()
    for drafted, accepted in steps:
        history = after_verify(POLICY, after_step(history), drafted, min(drafted, accepted))
        assert 0 <= history.wait_steps <= POLICY.max_probe_steps
        assert history.gain >= 0
