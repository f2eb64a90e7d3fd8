"""The one source of time: monotonic for deadlines, wall clock for display and retention only."""

import time


def monotonic_s() -> float:
    """Seconds on a clock that never steps; the base of every deadline."""
    return time.monotonic()


def unix_s() -> float:
    """Wall-clock seconds; for timestamps shown to people and for retention."""
    return time.time()
