"""The command line as a user meets it: in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "finback.services.supervisor"]


def finback(*arguments: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FINBACK_")}
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=cwd,
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--nonsense"], "No such option: --nonsense"),
        (["up", "--http-port", "x"], "--http-port"),
        (["up", "--set", "http_prt=1"], "unknown setting http_prt.*did you mean http_port"),
        (["up", "--set", "http_port"], "KEY=VALUE"),
        (["up", "--http-port", "70000"], "http_port must be at most 65535"),
        (["up", "--set", "http_port=70000"], "http_port must be at most 65535"),
        (["up", "--set", "model=/no/such/file.gguf"], "/no/such/file.gguf"),
        (["up", "--separate", "--cohost"], "exclude each other"),
        (["up", "--config", "missing.toml"], "missing.toml"),
        (["up", "--model", "/no/such/file.gguf"], "/no/such/file.gguf"),
        (["status"], "no stack runs in .*finback up"),
        (["chat", "hello"], "no stack runs"),
        (["trace", "last"], "no trace of last"),
        (["logs", "router"], "no log of 'router'"),
        (["wash"], "No such command 'wash'"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = finback(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(said, done.stderr), done.stderr


def test_an_unknown_variable_is_named(tmp_path: Path) -> None:
    done = finback("up", cwd=tmp_path, FINBACK_HTTP_PROT="1")
    assert done.returncode == 2
    assert "FINBACK_HTTP_PORT" in done.stderr


def test_down_without_a_stack_is_no_error(tmp_path: Path) -> None:
    done = finback("down", "--run-dir", str(tmp_path / "run"), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no stack runs\n")


def test_config_tells_values_and_where_they_come_from(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text("draft_tokens = 6\n")
    done = finback(
        "config", "--config", "f.toml", "--json", cwd=tmp_path, FINBACK_NATS_PASSWORD="hush"
    )
    assert done.returncode == 0
    told = json.loads(done.stdout)
    assert told["draft_tokens"] == {"value": 6, "source": "f.toml"}
    assert told["nats_password"] == {"value": "***", "source": "FINBACK_NATS_PASSWORD"}
    assert told["block_size"]["source"] == "default"


def test_the_command_line_stays_light(tmp_path: Path) -> None:
    program = (
        "import sys, finback.services.supervisor.cli, finback.services.supervisor.supervisor;"
        "print([m for m in ('torch', 'numba', 'transformers', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"


def test_help_lists_the_commands(tmp_path: Path) -> None:
    done = finback("--help", cwd=tmp_path)
    assert done.returncode == 0
    for name in ("up", "down", "status", "chat", "trace", "models", "keys", "doctor", "kernels"):
        assert name in done.stdout
