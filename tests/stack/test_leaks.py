"""A short run of `benchmarks/cache/leaks.py`: requests, streams and a kill leave nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cache" / "leaks.py"


@pytest.mark.stack
@pytest.mark.timeout(600)
def test_nothing_is_held_afterwards() -> None:
    few = ("--warm", "4", "--requests", "16", "--streams", "8", "--kills", "1")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *few],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert '"held": {}' in done.stdout
