"""A whole stack of one's own for a benchmark: `finback up`, its address and processes, `finback down`."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

FINBACK: Final = str(Path(sys.executable).with_name("finback"))
TIMEOUT_S: Final = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """`pids`: every process that serves: the services, NATS and the supervisor."""

    url: str
    model: str
    pids: dict[str, int]


@contextmanager
def stack(*arguments: str) -> Iterator[Stack]:
    """Up with these arguments of `finback up`, in a run directory of its own; down at the end."""
    with run_stack(*arguments) as (made, _):
        yield made


@contextmanager
def run_stack(*arguments: str) -> Iterator[tuple[Stack, str]]:
    """`stack`, and its run directory."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = ("--run-dir", folder)
        up = [FINBACK, "up", "--detach", *run_dir, *arguments]
        subprocess.run(up, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
        try:
            asked = [FINBACK, "status", "--json", *run_dir]
            answer = subprocess.run(asked, check=True, capture_output=True, timeout=TIMEOUT_S)
            status = json.loads(answer.stdout)
            pids = {name: int(found["pid"]) for name, found in status["services"].items()}
            made = Stack(
                url=status["http"].removesuffix("/v1"),
                model=status["model"],
                pids=_others(folder, pids),
            )
            yield made, folder
        finally:
            down = [FINBACK, "down", *run_dir]
            subprocess.run(down, check=False, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


def _others(run_dir: str, pids: dict[str, int]) -> dict[str, int]:
    """And whatever else runs on this run directory; co-hosted roles are one process."""
    found, seen = {}, set[int]()
    for name, pid in pids.items():
        if pid not in seen:
            found[name] = pid
            seen.add(pid)
    for process in psutil.process_iter(["pid", "cmdline", "name"]):
        if process.pid not in seen and run_dir in " ".join(process.info["cmdline"] or ()):
            found[str(process.info["name"])] = process.pid
    return found


def cpu_s(pid: int) -> float:
    """User and system time that a process has used so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
