"""CPU time and memory of a set of processes, read from the kernel."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import psutil

SAMPLE_S: Final = 0.25


def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """User and system time that each process has used so far; those that are gone are left out."""
    found = {}
    for pid in pids:
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found


def rss_bytes(pids: Sequence[int]) -> int:
    """Resident memory in sum: what two of them share counts twice."""
    total = 0
    for pid in pids:
        with suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total


def pss_bytes(pids: Sequence[int]) -> int | None:
    """Resident memory in sum, each shared page divided among those that map it; None: not told."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_full_info().pss
        except (psutil.Error, AttributeError):
            return None
    return total


class Meter:
    """Around one repetition: CPU time that each process used in it, and the largest memory seen.

    Between two looks a process may have had more than it shows; its own peak is not asked, since it
    may lie before the repetition.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.cpu_s: dict[int, float] = {}
        self._cpu_before_s: dict[int, float] = {}
        self.peak_rss_bytes = 0
        self.pss_bytes: int | None = None
        self._pids = pids
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._cpu_before_s = cpu_s(self._pids)
        if self._pids:
            self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = self._cpu_before_s
        self.cpu_s = {pid: used - before.get(pid, 0.0) for pid, used in cpu_s(self._pids).items()}
        if self._task is not None:
            self._task.cancel()
        if self._pids:
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes(self._pids))
            self.pss_bytes = pss_bytes(self._pids)

    async def _watch(self) -> None:
        while True:
            self.peak_rss_bytes = max(self.peak_rss_bytes, rss_bytes(self._pids))
            await asyncio.sleep(SAMPLE_S)
