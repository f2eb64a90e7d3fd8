"""The pure parts against slow, obvious twins."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from finback.services.cache.segments import retention_clock
from finback.services.cache.segments.policy import (
    Room,
    class_order,
    expire_limit,
    plan_compaction,
    spare_bytes,
)
from finback.services.cache.segments.record import Entry, Place
from finback.services.cache.segments.retention_clock import HOLD_S, STEP_S, ClockState
from finback.services.cache.segments.runs import runs
from finback.services.cache.segments.segment_table import Segment
from support.segments import block

PAGE = 4096


def _entry(place: tuple[int, int, int], is_packed: bool) -> Entry:
    segment_id, page, num_pages = place
    return Entry(
        row_id=0,
        record=block(0, 1)[0],
        place=Place(segment_id=segment_id, offset=page * PAGE, span=num_pages * PAGE),
        is_packed=is_packed,
        is_own=True,
    )


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(1, 4), st.booleans(), st.booleans())),
    st.integers(1, 8),
)
def test_runs_join_exactly_the_neighbours(
    steps: list[tuple[int, int, bool, bool]], most_pages: int
) -> None:
    ends = {1: 1, 2: 1}
    entries = []
    for segment_id, num_pages, has_gap, is_packed in steps:
        start = ends[segment_id] + has_gap
        entries.append(_entry((segment_id, start, num_pages), is_packed))
        ends[segment_id] = start + num_pages
    groups = runs(list(enumerate(reversed(entries))), most_pages * PAGE)
    numbers = [number for group in groups for number, _ in group]
    assert sorted(numbers) == list(range(len(entries)))
    for group in groups:
        for (_, one), (_, other) in itertools.pairwise(group):
            assert one.place.end == other.place.offset
            assert one.place.segment_id == other.place.segment_id
            assert not (one.is_packed or other.is_packed)
        size = sum(entry.place.span for _, entry in group)
        assert size <= most_pages * PAGE or len(group) == 1
    for before, after in itertools.pairwise(groups):
        one, other = before[-1][1], after[0][1]
        is_neighbour = (
            one.place.segment_id == other.place.segment_id
            and one.place.end == other.place.offset
            and not (one.is_packed or other.is_packed)
        )
        size = sum(entry.place.span for _, entry in before) + other.place.span
        assert not is_neighbour or size > most_pages * PAGE


SEGMENTS = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 100), st.booleans()), max_size=8
).map(
    lambda rows: [
        Segment(
            segment_id=number + 1,
            path=f"w/{number}",
            size=100 * PAGE,
            holes=(100 - max(live, taken)) * PAGE,
            is_own=is_own,
            live_bytes=live * PAGE,
        )
        for number, (live, taken, is_own) in enumerate(rows)
    ]
)


@given(SEGMENTS, st.integers(0, 9), st.integers(0, 300), st.booleans())
def test_compaction_takes_the_most_wasted_within_the_budget(
    segments: list[Segment], active_id: int, budget_pages: int, is_tight: bool
) -> None:
    plan = plan_compaction(
        segments,
        active_id=active_id,
        segment_bytes=100 * PAGE,
        budget_bytes=budget_pages * PAGE,
        is_tight=is_tight,
    )
    by_id = {segment.segment_id: segment for segment in segments}
    mine = {s.segment_id for s in segments if s.is_own and s.segment_id != active_id}
    assert set(plan.drop) == {number for number in mine if not by_id[number].live_bytes}
    assert set(plan.copy) <= mine - set(plan.drop)
    bound = 0.1 if is_tight else 0.5

    def waste(number: int) -> float:
        return 1 - by_id[number].live_bytes / max(1, by_id[number].taken_bytes)

    live = [number for number in mine if by_id[number].live_bytes]
    wasted = sorted((n for n in live if waste(n) >= bound), key=lambda n: (-waste(n), n))
    small = [n for n in live if waste(n) < bound and by_id[n].live_bytes < 25 * PAGE]
    small = sorted(small, key=lambda n: (by_id[n].live_bytes, n)) if len(small) >= 4 else []
    wanted = [*wasted, *small]
    assert list(plan.copy) == wanted[: len(plan.copy)]
    cost = [by_id[number].live_bytes for number in wanted]
    num = len(plan.copy)
    assert num <= 1 or sum(cost[:num]) <= budget_pages * PAGE
    if budget_pages and num < len(wanted):
        assert num >= 1
        assert sum(cost[: num + 1]) > budget_pages * PAGE


@given(st.sets(st.sampled_from(["batch", "chat", "agent", "odd", "a"])))
def test_classes_are_evicted_in_order(known: set[str]) -> None:
    order = class_order(known)
    assert order[-3:] == ["batch", "chat", "agent"]
    assert set(order) == known | {"batch", "chat", "agent"}


@given(st.integers(0, 1000), st.integers(1, 1000), st.integers(0, 1000))
def test_room_is_what_is_left(taken: int, most: int, coming: int) -> None:
    room = Room(taken_bytes=taken, max_bytes=most, spare_bytes=spare_bytes(most, 50))
    excess = room.excess(coming)
    assert (excess == 0) == (taken + coming <= most)
    assert taken + coming - excess <= most
    assert taken - room.sweep_excess() <= most - room.spare_bytes


def test_one_sweep_expires_a_tenth() -> None:
    assert expire_limit(50) == 1000
    assert expire_limit(1_000_000) == 100_000


STEPS = st.lists(
    st.tuples(
        st.floats(0, 5000),
        st.one_of(st.just(0.0), st.sampled_from([-1e9, -4000.0, -200.0, 200.0, 4000.0, 1e6, 1e9])),
    ),
    max_size=20,
)


@given(STEPS)
def test_the_clock_follows_a_jump_after_an_hour_and_never_at_once(
    steps: list[tuple[float, float]],
) -> None:
    state = ClockState(unix_s=1e9, monotonic_s=0.0)
    unix_s, monotonic_s, last_jump_s = 1e9, 0.0, float("-inf")
    for passed_s, jump_s in steps:
        monotonic_s += passed_s
        unix_s += passed_s + jump_s
        before = state.believed(monotonic_s)
        state = retention_clock.advance(state, unix_s, monotonic_s)
        is_followed = state.unix_s == unix_s
        if not is_followed:
            assert state.unix_s == before  # else it goes on as it did
        if abs(unix_s - before) <= STEP_S:
            assert is_followed
        elif abs(jump_s) > STEP_S:
            assert not is_followed
        if abs(jump_s) > 0:
            last_jump_s = monotonic_s
    # What goes on without a jump for more than an hour is believed.
    for passed_s in (1.0, HOLD_S, 1.0):
        monotonic_s += passed_s
        unix_s += passed_s
        state = retention_clock.advance(state, unix_s, monotonic_s)
    assert state.unix_s == unix_s
    assert last_jump_s <= monotonic_s


def test_after_a_restart_only_a_likely_time_is_taken() -> None:
    for gap_s, is_taken in (
        (0, True),
        (80_000, True),
        (90_000, False),
        (-200, True),
        (-400, False),
    ):
        state = retention_clock.start(1e9 + gap_s, 5.0, 1e9)
        assert (state.unix_s == 1e9 + gap_s) == is_taken
    assert retention_clock.start(5.0, 5.0, None).unix_s == 5.0
