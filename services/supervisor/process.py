"""One child process: started in a session of its own, its output to a log file, its end awaited."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finback.services.supervisor import log_files, run_dir


@dataclass(slots=True)
class Child:
    """A running process. `signalled` tells our own signals from those sent from outside."""

    pid: int
    start_time: float
    exited: asyncio.Task[int]
    signalled: bool = False

    @property
    def is_running(self) -> bool:
        return not self.exited.done()

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        return await asyncio.shield(self.exited)

    def send(self, number: signal.Signals) -> None:
        """Signal the process alone."""
        if self.is_running:
            self.signalled = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process and whatever it has started."""
        if self.is_running:
            self.signalled = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> bool:
        """Ask to stop, kill after `timeout_s`; True if it went by itself."""
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait()
                return True
        except TimeoutError:
            self.kill()
            await self.wait()
            return False


async def start(command: Sequence[str], env: Mapping[str, str], log: Path) -> Child:
    """Start `command`; its group outlives us, so that a dead supervisor does not take it along."""
    log_files.rotate(log)
    output = log_files.open_for_append(log)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            start_new_session=True,
        )
    finally:
        os.close(output)
    return Child(
        pid=process.pid,
        start_time=run_dir.start_time(process.pid),
        exited=asyncio.create_task(process.wait(), name=f"wait-{process.pid}"),
    )


def python_module(module: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module]
