"""`finback kernels`: asks a process that may load the kernels, since this one stays light."""

import json
import subprocess
import sys
from typing import Any

from finback.shared.errors import ConfigError

_PROGRAM = """
import json, sys
from finback.kernels import dispatch
rows = dispatch.table(sys.argv[1], sys.argv[2])
print(json.dumps(rows))
"""


def kernels(device: str, *, deterministic: bool, as_json: bool) -> int:
    """Which implementation serves each op, and why."""
    rows = _table(device, "deterministic" if deterministic else "fast")
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(highlight=False).print(table)
    return 0


def _table(device: str, mode: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, device, mode], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ConfigError(f"kernels cannot be loaded: {reason}; see finback doctor")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found
