"""A short run of `benchmarks/cache/corruption.py`: every flipped bit that is read is found."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "cache" / "corruption.py"


@pytest.mark.nats
@pytest.mark.parametrize("seed", [1, 2])
def test_every_flip_is_found(seed: int) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "80", "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all         80 runs    80 found 0 wrong" in done.stdout
