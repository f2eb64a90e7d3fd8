"""Lanes are tried in order, and one that failed is left alone for a while."""

from hypothesis import given
from hypothesis import strategies as st

from finback.shared.lanes.select import MAX_QUIET_S, MAX_REMEMBERED, ORDER, QUIET_S, LaneChoice

LANES = st.sampled_from(ORDER)
PEERS = st.sampled_from(["a", "b"])
EVENTS = st.lists(
    st.tuples(st.sampled_from(["failed", "worked"]), PEERS, LANES, st.floats(0.1, 100)), max_size=30
)


@given(EVENTS, PEERS, st.sets(LANES))
def test_the_first_usable_lane_that_is_not_quiet(
    events: list[tuple[str, str, str, float]], peer: str, usable: set[str]
) -> None:
    choice, now_s = LaneChoice(), 0.0
    history: dict[tuple[str, str], list[float]] = {}
    for what, who, lane, wait_s in events:
        now_s += wait_s
        if what == "worked":
            choice.worked(who, lane)
            history.pop((who, lane), None)
        else:
            choice.failed(who, lane, now_s)
            history.setdefault((who, lane), []).append(now_s)
    quiet = {lane for lane in ORDER[:-1] if now_s < _until(history.get((peer, lane), []))}
    expected = next((lane for lane in ORDER if lane in usable - quiet), ORDER[-1])
    assert choice.choose(peer, tuple(usable), now_s) == expected


def _until(failures: list[float]) -> float:
    """The slow twin: each failure outside a quiet time begins one of double length."""
    until_s, quiet_s = 0.0, 0.0
    for at_s in failures:
        if at_s >= until_s:
            quiet_s = min(MAX_QUIET_S, 2 * quiet_s) or QUIET_S
            until_s = at_s + quiet_s
    return until_s


def test_memory_is_bounded() -> None:
    choice = LaneChoice()
    for number in range(MAX_REMEMBERED + 10):
        choice.failed(f"peer-{number}", "shm", 0.0)
    assert choice.choose("peer-0", ("shm",), 0.5) == "shm", "the oldest is forgotten"
    assert choice.choose(f"peer-{MAX_REMEMBERED}", ("shm",), 0.5) == "nats"
