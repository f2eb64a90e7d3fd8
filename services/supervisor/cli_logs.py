"""`finback logs`."""

import sys
import time
from pathlib import Path
from typing import Final

from finback.services.supervisor import locate, log_files
from finback.shared.errors import ConfigError

_POLL_S: Final = 0.2
_TAIL_BYTES: Final = 4 * 1024 * 1024


def logs(given: Path | None, service: str, *, follow: bool, lines: int) -> int:
    """Print the last lines of a service's log, and what comes after with `follow`."""
    run_dir = locate.run_dir(given)
    state = run_dir.read_state()
    path = run_dir.log(service)
    if not path.exists() and state is not None and service in state.services:
        # Co-hosted roles share the process of decode, and so its log.
        path = run_dir.log(state.services[service].instance.rpartition("-")[0])
    if not path.exists():
        known = sorted(file.stem for file in run_dir.logs.glob("*.log"))
        listed = ", ".join(known) or f"none in {run_dir.logs}"
        raise ConfigError(f"no log of {service!r}; there are: {listed}")
    ending = log_files.tail(path, _TAIL_BYTES).splitlines()
    sys.stdout.writelines(f"{line}\n" for line in ending[len(ending) - min(lines, len(ending)) :])
    sys.stdout.flush()
    if follow:
        _follow(path)
    return 0


def _follow(path: Path) -> None:
    offset = path.stat().st_size
    while True:
        size = path.stat().st_size
        if size < offset:  # rotated
            offset = 0
        if size > offset:
            with path.open("rb") as file:
                file.seek(offset)
                sys.stdout.write(file.read(size - offset).decode(errors="replace"))
                sys.stdout.flush()
            offset = size
        time.sleep(_POLL_S)
