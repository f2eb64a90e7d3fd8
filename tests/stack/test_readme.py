"""The programs that the README shows, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.stack import COMMAND, Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

README = Path(__file__).resolve().parents[2] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_of_the_readme_prints_an_answer(
    stack: Stack, number: int, tmp_path: Path
) -> None:
    program = PROGRAMS[number].replace("http://127.0.0.1:8000", stack.http)
    command = ", ".join(repr(part) for part in COMMAND)
    program = program.replace('".venv/bin/finback"', command)
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "FINBACK_RUN_DIR": str(stack.run_dir)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
