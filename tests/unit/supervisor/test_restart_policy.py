"""When an ended process is started again."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.supervisor import restart_policy
from finback.services.supervisor.restart_policy import RestartPolicy, decide, is_crash

POLICY = RestartPolicy()


def test_a_signal_from_outside_is_no_crash() -> None:
    assert not is_crash(-signal.SIGKILL)
    assert not is_crash(-signal.SIGTERM)
    assert not is_crash(0)


@pytest.mark.parametrize("exit_code", [1, 2, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS])
def test_what_a_process_brings_upon_itself_is_a_crash(exit_code: int) -> None:
    assert is_crash(exit_code)


def test_an_out_of_memory_kill_is_a_crash() -> None:
    assert is_crash(-signal.SIGKILL, out_of_memory=True)


def test_five_crashes_in_a_minute_mark_the_service_failed() -> None:
    crashes: tuple[float, ...] = ()
    for second in range(4):
        decision = decide(POLICY, crashes, float(second), crashed=True, random_unit=0.5)
        assert decision.delay_s is not None
        crashes = decision.crashes_s
    assert decide(POLICY, crashes, 5.0, crashed=True, random_unit=0.5).delay_s is None


def test_old_crashes_are_forgotten() -> None:
    decision = decide(POLICY, (0.0, 1.0, 2.0, 3.0), 70.0, crashed=True, random_unit=0.5)
    assert decision.delay_s == pytest.approx(POLICY.first_delay_s)
    assert decision.crashes_s == (70.0,)


def test_kills_from_outside_never_mark_it_failed() -> None:
    crashes: tuple[float, ...] = ()
    for second in range(50):
        decision = decide(POLICY, crashes, float(second), crashed=False, random_unit=0.5)
        assert decision.delay_s == 0.0
        crashes = decision.crashes_s


@given(
    gaps=st.lists(st.floats(0.0, 40.0), min_size=1, max_size=30),
    random_unit=st.floats(0.0, 1.0, exclude_max=True),
)
def test_delays_grow_and_stay_bounded(gaps: list[float], random_unit: float) -> None:
    now_s, crashes = 0.0, tuple[float, ...]()
    for gap in gaps:
        now_s += gap
        decision = decide(POLICY, crashes, now_s, crashed=True, random_unit=random_unit)
        in_window = [at for at in (*crashes, now_s) if now_s - at < POLICY.window_s]
        assert (decision.delay_s is None) == (len(in_window) >= POLICY.max_crashes)
        if decision.delay_s is None:
            return
        assert 0.0 < decision.delay_s <= POLICY.max_delay_s * (1 + POLICY.jitter)
        crashes = decision.crashes_s


def test_exits_are_described_in_words() -> None:
    assert restart_policy.describe_exit(-9) == "killed by SIGKILL"
    assert restart_policy.describe_exit(3) == "exit code 3"
    assert restart_policy.describe_exit(-120) == "killed by signal 120"
