"""Tells the kernel's out-of-memory kill from a SIGKILL that somebody sent."""

from pathlib import Path
from typing import Final

# Version 2 and version 1 of control groups, as seen from inside a container or session.
_COUNTERS: Final = (
    Path("/sys/fs/cgroup/memory.events"),
    Path("/sys/fs/cgroup/memory/memory.oom_control"),
    Path("/proc/vmstat"),
)


class MemoryKills:
    """Compares the kernel's counter with what it was at `mark`."""

    def __init__(self) -> None:
        self._marked: int = 0

    def mark(self) -> None:
        self._marked = count()

    def happened(self) -> bool:
        """Whether any process was killed for memory since `mark`; ours is then the likely one."""
        return count() > self._marked


def count() -> int:
    """Out-of-memory kills so far, 0 where the kernel does not say."""
    for path in _COUNTERS:
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0
