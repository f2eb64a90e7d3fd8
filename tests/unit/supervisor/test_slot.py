"""A slot keeps a real process running."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from finback.services.supervisor import slot as slots
from finback.services.supervisor.restart_policy import RestartPolicy
from finback.services.supervisor.run_dir import RunDir
from finback.services.supervisor.slot import Slot
from finback.services.supervisor.topology import ProcessSpec
from finback.shared.errors import ConfigError

SERVES = "import signal; signal.pause()"
IS_STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True)\n"
IS_STUBBORN += "while True: signal.pause()"
CRASHES = "raise SystemExit('no luck')"
IS_MISCONFIGURED = "import sys; print('weights are missing', file=sys.stderr); sys.exit(2)"


class Recorder:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, str]] = []
        self.crashes: list[bool] = []
        self.lost_one = asyncio.Event()

    def changed(self) -> None:
        return

    async def lost(self, slot: Slot, instance: str, reason: str, *, is_crash: bool) -> None:
        self.losses.append((instance, reason))
        self.crashes.append(is_crash)
        self.lost_one.set()


def make(tmp_path: Path, program: str) -> tuple[Slot, Recorder]:
    (tmp_path / "stub_service.py").write_text(program)
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    recorder = Recorder()
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    spec = ProcessSpec(name="stub", module="stub_service", roles=("stub",))
    policy = RestartPolicy(first_delay_s=0.01)
    return Slot(spec, run_dir, lambda spec, instance: env, recorder, policy), recorder


async def started(slot: Slot) -> int:
    """The pid, once there is a process that runs."""
    async with asyncio.timeout(20):
        while slot.child is None or not slot.child.is_running:  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.01)
    return slot.child.pid


async def test_a_killed_process_is_told_of_and_started_again(tmp_path: Path) -> None:
    slot, recorder = make(tmp_path, SERVES)
    keep = asyncio.create_task(slot.keep())
    pid, instance = await started(slot), slot.instance
    slot.report_state("serving")
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await recorder.lost_one.wait()
    assert recorder.losses == [(instance, "killed by SIGKILL")]
    assert await started(slot) != pid
    assert slot.instance != instance
    assert not slot.serving.is_set()
    await slot.stop(5)
    await keep
    assert slot.state == "stopped"
    assert len(recorder.losses) == 1


async def test_crashes_end_in_failed_with_the_last_words(tmp_path: Path) -> None:
    slot, recorder = make(tmp_path, CRASHES)
    async with asyncio.timeout(30):
        await slot.keep()
    assert slot.state == "failed"
    assert slot.detail == "no luck"
    assert len(recorder.losses) == 5
    with pytest.raises(ConfigError, match="stub did not start: no luck"):
        await slots.wait_serving([slot], 5, lambda names: None)


async def test_a_wrong_setting_is_not_tried_again(tmp_path: Path) -> None:
    slot, _ = make(tmp_path, IS_MISCONFIGURED)
    async with asyncio.timeout(20):
        await slot.keep()
    assert (slot.state, slot.detail, slot.restarts) == ("failed", "weights are missing", 0)


async def test_one_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    slot, _ = make(tmp_path, IS_STUBBORN)
    keep = asyncio.create_task(slot.keep())
    pid = await started(slot)
    log = slot.run_dir.log("stub")
    async with asyncio.timeout(20):
        while "deaf" not in log.read_text():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(0.01)
    await slot.stop(0.2)
    await keep
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_waiting_for_services_ends_at_its_deadline(tmp_path: Path) -> None:
    slot, _ = make(tmp_path, SERVES)
    keep = asyncio.create_task(slot.keep())
    await started(slot)
    with pytest.raises(ConfigError, match="not serving after 0 s: stub"):
        await slots.wait_serving([slot], 0.1, lambda names: None)
    await slot.stop(5)
    await keep
