"""Processor time of a stack by process: its event loop's thread, its other threads, its children.

Linux only: nanoseconds from `/proc/<pid>/task/<tid>/schedstat`, so that a round of a second counts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

_PROC: Final = Path("/proc")

# (process, thread)
Thread = tuple[int, int]


class ProcessTimes:
    """What each part of a stack has used. `pids`: its processes by name; children are their parent's."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = self._now()

    def lap(self) -> dict[str, float]:
        """Seconds by part since the last lap. Threads that ended meanwhile do not count."""
        before, self._before = self._before, self._now()
        used: dict[str, float] = {}
        for part, threads in self._before.items():
            for thread, time_s in threads.items():
                spent_s = time_s - before.get(part, {}).get(thread, 0.0)
                used[part] = used.get(part, 0.0) + spent_s
        return used

    def _now(self) -> dict[str, dict[Thread, float]]:
        found: dict[str, dict[Thread, float]] = {}
        known = set(self._pids.values())
        for name, pid in self._pids.items():
            threads = _threads(pid)
            main = {thread: time_s for thread, time_s in threads.items() if thread[1] == pid}
            others = {thread: time_s for thread, time_s in threads.items() if thread[1] != pid}
            found |= {name: main, f"{name}, other threads": others}
            found[f"{name}, children"] = _children(pid, known)
        return found


def _children(pid: int, known: set[int]) -> dict[Thread, float]:
    """Of children, and theirs, but for those that count by themselves."""
    found: dict[Thread, float] = {}
    for child in psutil.Process(pid).children():
        if child.pid not in known:
            found |= _threads(child.pid) | _children(child.pid, known)
    return found


def _threads(pid: int) -> dict[Thread, float]:
    found: dict[Thread, float] = {}
    for path in (_PROC / str(pid) / "task").glob("*/schedstat"):
        try:
            found[pid, int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
    return found
