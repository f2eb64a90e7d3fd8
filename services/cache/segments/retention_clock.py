"""The time by which blocks expire: wall clock, but it does not follow a jump at once. Pure.

While the process runs, steps show against the monotonic clock. Across a restart only what was kept
tells: a clock that went back, or a gap of more than a day, is held in doubt. A new time that goes
on steadily for an hour is believed: a machine with a wrong clock has been set right by then, and
one that was off for long loses its old blocks an hour later than it might.
"""

from dataclasses import dataclass
from typing import Final

STEP_S: Final = 300.0
HOLD_S: Final = 3600.0
LONGEST_OFF_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """Time `unix_s` was believed at `monotonic_s`. `doubt_s`: the other time's lead, since when."""

    unix_s: float
    monotonic_s: float
    doubt_s: float | None = None
    doubted_since_s: float = 0.0

    def believed(self, monotonic_s: float) -> float:
        """The time now, by what was believed."""
        return self.unix_s + (monotonic_s - self.monotonic_s)


def start(unix_s: float, monotonic_s: float, kept_unix_s: float | None) -> ClockState:
    """After a restart; `kept_unix_s` is the time that was written down last, if any."""
    trusted = ClockState(unix_s=unix_s, monotonic_s=monotonic_s)
    if kept_unix_s is None or -STEP_S <= unix_s - kept_unix_s <= LONGEST_OFF_S:
        return trusted
    return ClockState(
        unix_s=kept_unix_s,
        monotonic_s=monotonic_s,
        doubt_s=unix_s - kept_unix_s,
        doubted_since_s=monotonic_s,
    )


def advance(state: ClockState, unix_s: float, monotonic_s: float) -> ClockState:
    """The state after a look at both clocks."""
    believed = state.believed(monotonic_s)
    lead = unix_s - believed
    if abs(lead) <= STEP_S:
        return ClockState(unix_s=unix_s, monotonic_s=monotonic_s)
    if state.doubt_s is None or abs(lead - state.doubt_s) > STEP_S:
        since = monotonic_s  # a new jump, or another one on top
    elif monotonic_s - state.doubted_since_s >= HOLD_S:
        return ClockState(unix_s=unix_s, monotonic_s=monotonic_s)
    else:
        since = state.doubted_since_s
    return ClockState(unix_s=believed, monotonic_s=monotonic_s, doubt_s=lead, doubted_since_s=since)
