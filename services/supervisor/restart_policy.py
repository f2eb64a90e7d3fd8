"""Whether and when an ended process is started again. Pure: no clock, no process, no random source."""

import signal
from dataclasses import dataclass
from typing import Final

# A process brings these upon itself; any other signal that we did not send came from outside.
CRASH_SIGNALS: Final = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Exponential back-off with jitter; `max_crashes` within `window_s` mean failed."""

    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    window_s: float = 60.0
    max_crashes: int = 5
    jitter: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`delay_s` is None when the service has failed; `crashes_s` are the times still counted."""

    delay_s: float | None
    crashes_s: tuple[float, ...]


def is_crash(exit_code: int, *, out_of_memory: bool = False) -> bool:
    """Whether this end counts against the service.

    `exit_code` as `subprocess` gives it: negative is the signal. Someone who kills a service by hand
    or drains it is not a fault of the service; the kernel's out-of-memory kill is.
    """
    if exit_code < 0:
        return out_of_memory or -exit_code in CRASH_SIGNALS
    return exit_code != 0


def decide(
    policy: RestartPolicy,
    crashes_s: tuple[float, ...],
    now_s: float,
    *,
    crashed: bool,
    random_unit: float,
) -> Decision:
    """The next start after an end at `now_s`; `random_unit` in [0, 1) spreads the delay."""
    recent = tuple(at for at in crashes_s if now_s - at < policy.window_s)
    if not crashed:
        return Decision(delay_s=0.0, crashes_s=recent)
    recent = (*recent, now_s)
    if len(recent) >= policy.max_crashes:
        return Decision(delay_s=None, crashes_s=recent)
    delay_s = min(policy.max_delay_s, policy.first_delay_s * 2.0 ** (len(recent) - 1))
    return Decision(
        delay_s=delay_s * (1.0 + policy.jitter * (2.0 * random_unit - 1.0)), crashes_s=recent
    )


def describe_exit(exit_code: int) -> str:
    """An end in words, for logs and people."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
