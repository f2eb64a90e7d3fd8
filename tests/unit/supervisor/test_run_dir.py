"""Lock, state file, and what is cleared after a dead stack."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from finback.services.supervisor import cleanup
from finback.services.supervisor.run_dir import (
    RunDir,
    ServiceState,
    StackState,
    remains,
    start_time,
    write_private,
)
from finback.shared.errors import ConfigError


def state_of(pid: int, shm_dir: Path, started: float | None = None) -> StackState:
    service = ServiceState(
        state="serving",
        pid=pid,
        instance="cache-abc123",
        start_time=start_time(pid) if started is None else started,
    )
    return StackState(
        stack_id="s1",
        supervisor_pid=1,
        supervisor_start_time=0.0,
        http="http://127.0.0.1:1",
        nats="nats://127.0.0.1:2",
        model="m",
        shm_dir=str(shm_dir),
        services={"cache": service},
    )


def test_the_state_survives_the_file(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    state = state_of(os.getpid(), tmp_path)
    run_dir.write_state(state)
    assert run_dir.read_state() == state
    assert stat.S_IMODE(run_dir.state_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(run_dir.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stack_id": "x"}', '{"services": 3}'])
def test_a_broken_state_file_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    assert RunDir(tmp_path).read_state() is None


def test_the_second_lock_names_the_holder_and_the_way_out(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.holder_pid() is None
    lock = run_dir.lock()
    assert run_dir.holder_pid() == os.getpid()
    with pytest.raises(ConfigError, match=rf"pid {os.getpid()}.*finback down.*--run-dir"):
        run_dir.lock()
    lock.release()
    assert run_dir.holder_pid() is None
    run_dir.lock().release()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use run directory"):
        RunDir(tmp_path / "file" / "run").create()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_private(path, "old")
    with pytest.raises(TypeError):
        write_private(path, 5)  # type: ignore[arg-type]  # what a bug would do
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_a_dead_stack_is_cleared(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    arena = tmp_path / "shm" / "s1"
    arena.mkdir(parents=True)
    (arena / "extent").write_bytes(b"x")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        run_dir.write_state(state_of(child.pid, tmp_path / "shm"))
        state = run_dir.read_state()
        assert state is not None
        assert remains(state) == [("cache", child.pid)]
        assert cleanup.after_dead_stack(run_dir)
        assert child.wait(5) != 0
    assert not arena.exists()
    assert run_dir.read_state() is None
    assert not cleanup.after_dead_stack(run_dir)


def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        state = state_of(child.pid, tmp_path, started=start_time(child.pid) - 100)
        assert remains(state) == []
        cleanup.end_processes(state)
        assert child.poll() is None
        child.kill()
