"""Where a grammar's masks are computed, which worker a sequence gets, when a worker is slow."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.sampler.policy import (
    MAX_SEQUENCES_TOGETHER,
    MAX_SHARED_BYTES,
    MAX_SHARED_LOAD_MS,
    MAX_SHARED_MASK_MS,
    SLOW_CPU_S,
    STUCK_CPU_S,
    STUCK_WALL_S,
    Measured,
    Placement,
    WorkerLoad,
    choose_worker,
    engine_of,
    judge,
    placement_of,
)


def measured(load_ms: float, mask_ms: float, num_bytes: int, was_slow: bool = False) -> Measured:
    return Measured(
        compile_ms=load_ms,
        load_ms=load_ms,
        max_mask_ms=mask_ms,
        num_bytes=num_bytes,
        was_slow=was_slow,
    )


def test_only_a_grammar_that_is_quick_in_every_way_is_shared() -> None:
    quick = (MAX_SHARED_LOAD_MS, MAX_SHARED_MASK_MS, MAX_SHARED_BYTES)
    slow = (MAX_SHARED_LOAD_MS + 0.1, MAX_SHARED_MASK_MS + 0.1, MAX_SHARED_BYTES + 1)
    for load_ms, mask_ms, num_bytes, was_slow in itertools.product(
        *zip(quick, slow, strict=True), (False, True)
    ):
        is_quick = (load_ms, mask_ms, num_bytes, was_slow) == (*quick, False)
        found = placement_of(measured(load_ms, mask_ms, int(num_bytes), bool(was_slow)))
        assert found == ("shared" if is_quick else "own")


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark", "choice", "structural"])
def test_there_is_one_engine(kind: str) -> None:
    assert engine_of(kind) == "llguidance"


LOADS = st.lists(
    st.builds(
        WorkerLoad,
        num_sequences=st.integers(0, 40),
        num_of_grammar=st.integers(0, 20),
        has_grammar=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@given(LOADS)
def test_a_worker_that_has_the_grammar_and_room_comes_first(loads: list[WorkerLoad]) -> None:
    chosen = loads[choose_worker(loads)]
    fitting = [
        load for load in loads if load.has_grammar and load.num_of_grammar < MAX_SEQUENCES_TOGETHER
    ]
    if fitting:
        assert chosen.has_grammar
        assert chosen.num_of_grammar == max(load.num_of_grammar for load in fitting)
    else:
        assert chosen.num_sequences == min(load.num_sequences for load in loads)


def test_processor_time_decides_and_shared_workers_have_less_of_it() -> None:
    assert judge(SLOW_CPU_S / 2, 0.4, "shared") == "fine"
    assert judge(SLOW_CPU_S, SLOW_CPU_S, "shared") == "slow"
    assert judge(SLOW_CPU_S, SLOW_CPU_S, "own") == "fine"
    both: tuple[Placement, ...] = ("shared", "own")
    for placement in both:
        assert judge(STUCK_CPU_S, 1.0, placement) == "stuck"
        assert judge(0.0, STUCK_WALL_S, placement) == "stuck"
