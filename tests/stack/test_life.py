"""Starting, standing side by side, dying and stopping, with nothing left behind."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from support.nats_server import NatsServer
from support.stack import COMMAND, Stack, alive, finback, wait_gone

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def test_two_stacks_run_beside_each_other_and_a_dead_one_is_cleared(
    stack: Stack, run_dir: Path
) -> None:
    other = Stack(run_dir)
    other.up("--cohost", "--deterministic")
    try:
        services = other.status()["services"]
        assert services["prefill"]["pid"] == services["decode"]["pid"]
        assert other.http != stack.http
        for each in (stack, other):
            assert each.ask("Say hello.", max_tokens=8).completion_tokens > 0
        again = other.command("up", "--detach")
        assert again.returncode == 2
        assert "already runs" in again.stderr
        # Without its supervisor the stack serves on; `down` clears it away.
        pids = other.pids()
        os.kill(other.supervisor_pid, signal.SIGKILL)
        assert other.ask("Still there?", max_tokens=4).completion_tokens > 0
        assert other.status()["services"]["decode"]["state"] == "orphaned"
    finally:
        other.down()
    assert wait_gone(pids, 60) == []
    assert alive(stack.pids()) == stack.pids()
    assert stack.ask("And you?", max_tokens=4).completion_tokens > 0


def test_a_foreground_stack_on_an_outside_server_stops_at_ctrl_c(
    run_dir: Path, nats_server: NatsServer
) -> None:
    outside = f"nats_url={nats_server.url}"
    with subprocess.Popen(
        [*COMMAND, "up", "--cohost", "--set", outside, "--run-dir", str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("try"):
                break
        stack = Stack(run_dir)
        pids = stack.pids()
        assert stack.status()["nats"] == nats_server.url
        said = stack.command("chat", "Hi", "--nats", "--max-tokens", "4")
        assert said.returncode == 0, said.stderr
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == 0
    assert wait_gone(pids, 60) == []
    assert not (run_dir / "stack.json").exists()


def test_a_taken_port_is_one_line_and_leaves_nothing(run_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for option in ("--http-port", "--nats-port"):
            done = Stack(run_dir).command("up", "--detach", option, port)
            assert done.returncode == 2
            assert len(done.stderr.splitlines()) == 1
            assert f"port {port}" in done.stderr
            assert option in done.stderr
    assert not (run_dir / "stack.json").exists()


def test_a_broken_model_is_one_line_and_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    for model in (broken, tmp_path / "absent.gguf", tmp_path):
        done = finback("up", "--detach", "--model", str(model), "--run-dir", str(run_dir))
        assert done.returncode == 2
        assert str(model) in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (run_dir / "stack.json").exists()


def test_an_unknown_setting_in_a_file_is_one_line(run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("htp_port = 1\n")
    done = finback("up", "--config", str(file), "--run-dir", str(run_dir))
    assert done.returncode == 2
    assert "htp_port" in done.stderr
    assert "http_port" in done.stderr
