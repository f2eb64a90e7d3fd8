"""How often a request may go on elsewhere."""

from finback.services.gateway.generation import Lost
from finback.services.gateway.retries import (
    CRASH_WINDOW_S,
    MAX_ATTEMPTS,
    Retries,
    RetryBudget,
)
from finback.shared.errors import InvalidRequest, Unavailable

CRASH = Lost("gone", "decode-1", is_crash=True)
HANG = Lost("silent", "decode-1", is_crash=False, is_hang=True)
DRAIN = Lost("drains", "decode-1", is_crash=False, is_drain=True)


def new() -> Retries:
    made = Retries(RetryBudget())
    made.begin()
    return made


def fail(retries: Retries, error: Unavailable, *, progress: bool = False, at: float = 0.0) -> bool:
    may = retries.failed(error, has_progress=progress, now_s=at)
    if may:
        retries.begin()
    return may


def test_a_chain_has_three_attempts() -> None:
    retries = new()
    assert [fail(retries, HANG) for _ in range(3)] == [True, True, False]
    assert retries.num_attempts == 3


def test_an_attempt_that_got_on_begins_a_new_chain() -> None:
    retries = new()
    assert [fail(retries, HANG) for _ in range(2)] == [True, True]
    assert fail(retries, HANG, progress=True)
    assert [fail(retries, HANG) for _ in range(2)] == [True, False]


def test_progress_has_a_bound_too() -> None:
    retries = new()
    count = 1
    while fail(retries, HANG, progress=True):
        count += 1
    assert count == MAX_ATTEMPTS


def test_two_crashes_are_poison_whatever_came_between() -> None:
    retries = new()
    assert fail(retries, CRASH, progress=True)
    assert fail(retries, HANG, progress=True, at=1.0)
    assert not fail(retries, CRASH, progress=True, at=2.0)
    assert retries.is_poison


def test_crashes_far_apart_are_not() -> None:
    retries = new()
    assert fail(retries, CRASH, progress=True, at=0.0)
    assert fail(retries, CRASH, progress=True, at=CRASH_WINDOW_S)
    assert not retries.is_poison


def test_hangs_and_drains_are_no_crashes() -> None:
    retries = new()
    for error in (HANG, DRAIN, HANG, DRAIN):
        assert fail(retries, error, progress=True)
    assert not retries.is_poison


def test_a_drain_costs_nothing() -> None:
    budget = RetryBudget()
    while budget.spend():
        pass
    retries = Retries(budget)
    retries.begin()
    assert [fail(retries, DRAIN) for _ in range(5)] == [True] * 5
    assert not fail(retries, HANG)


def test_what_is_wrong_stays_wrong() -> None:
    retries = new()
    assert not retries.failed(InvalidRequest("no"), has_progress=True, now_s=0.0)


def test_the_budget_is_a_tenth() -> None:
    budget = RetryBudget()
    while budget.spend():
        pass
    for _ in range(15):
        budget.earn()
    assert (budget.spend(), budget.spend()) == (True, False)
