"""`finback down`: ask the supervisor to stop, insist if it does not, clear what is left."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from finback.services.supervisor import cleanup, locate
from finback.services.supervisor.run_dir import RunDir

# Above any drain time that makes sense for a person who waits; --force does not wait.
PATIENCE_S: Final = 90.0
FORCED_S: Final = 10.0


def down(given: Path | None, *, force: bool) -> int:
    """Stop the stack of a run directory; no stack is no error."""
    run_dir = locate.run_dir(given)
    pid = run_dir.holder_pid()
    if pid is None:
        had = cleanup.after_dead_stack(run_dir)
        sys.stdout.write("cleared what a dead stack had left\n" if had else "no stack runs\n")
        return 0
    state = run_dir.read_state()
    stopped = not force and _stop(run_dir, pid, PATIENCE_S)
    # A second signal means: at once.
    stopped = stopped or (_stop(run_dir, pid, 0.2) or _stop(run_dir, pid, FORCED_S))
    if not stopped and state is not None:
        cleanup.end_supervisor(state)
        cleanup.after_dead_stack(run_dir)
    sys.stdout.write("stopped\n")
    return 0


def _stop(run_dir: RunDir, pid: int, timeout_s: float) -> bool:
    """Signal once and wait for the lock to be free."""
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if run_dir.holder_pid() is None:
            return True
        time.sleep(0.05)
    return False
