"""Removes what a stack left that did not end by itself: processes, arena, state file."""

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Final

from finback.services.supervisor.run_dir import RunDir, StackState, is_same_process, remains
from finback.shared.telemetry.logging import get_logger

TERM_WAIT_S: Final = 3.0
MAX_TRACE_FILES: Final = 64

_log = get_logger(__name__)


def after_dead_stack(run_dir: RunDir) -> bool:
    """Clear the run directory of a stack whose supervisor is dead; True if there was one.

    The caller holds the lock or knows that nobody does.
    """
    state = run_dir.read_state()
    if state is None:
        return False
    end_processes(state)
    remove_arena(state)
    run_dir.state_file.unlink(missing_ok=True)
    return True


def end_processes(state: StackState) -> None:
    """End the processes that the state names, if they still are the ones that it means."""
    left = remains(state)
    for name, pid in left:
        _log.warning("ending a process of a dead stack", service=name, pid=pid)
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + TERM_WAIT_S
    while remains(state) and time.monotonic() < deadline:
        time.sleep(0.05)
    for _, pid in remains(state):
        _signal(pid, signal.SIGKILL)
    while remains(state) and time.monotonic() < deadline + TERM_WAIT_S:
        time.sleep(0.02)


def end_supervisor(state: StackState) -> None:
    """Kill a supervisor that does not answer to its signals any more."""
    if is_same_process(state.supervisor_pid, state.supervisor_start_time):
        _signal(state.supervisor_pid, signal.SIGKILL)


def remove_arena(state: StackState) -> None:
    """Delete the shared-memory folder of a stack whose processes are gone."""
    if state.shm_dir and state.stack_id:
        folder = Path(state.shm_dir)
        shutil.rmtree(folder / state.stack_id, ignore_errors=True)
        with contextlib.suppress(OSError):  # another stack's arena is in it
            folder.rmdir()


def prune_traces(folder: Path, max_files: int = MAX_TRACE_FILES) -> None:
    """Keep the newest span files; every start of a service begins one."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[max_files:]:
        file.unlink(missing_ok=True)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
