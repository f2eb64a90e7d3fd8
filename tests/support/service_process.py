"""A service as a real process, as the supervisor would start it, for tests that kill it."""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_READY_S = 90.0


@dataclass(slots=True)
class ServiceProcess:
    """`python -m finback.services.<name> <args>`. `env` are `FINBACK_*` settings.

    `within` goes before the command: `nsenter ...`, to run it on another (made-up) host.
    """

    name: str
    env: Mapping[str, str]
    args: Sequence[str] = ()
    ready_s: float = _READY_S
    within: Sequence[str] = ()
    start_s: float = field(default=0.0, init=False)
    lines: list[str] = field(default_factory=list, init=False)
    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    def start(self) -> "ServiceProcess":
        """Return when it says that it serves; `start_s` tells how long that took."""
        begun = time.monotonic()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FINBACK_")}
        process = self._process = subprocess.Popen(
            [*self.within, sys.executable, "-m", f"finback.services.{self.name}", *self.args],
            env={**clean, **self.env},
            stderr=subprocess.PIPE,
            text=True,
        )
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(process, lines), daemon=True).start()
        while time.monotonic() - begun < self.ready_s:
            try:
                line = lines.get(timeout=0.1)
            except queue.Empty:
                if process.poll() is not None:
                    break
                continue
            if '"serving"' in line:
                self.start_s = time.monotonic() - begun
                return self
        self.kill()
        raise RuntimeError(f"{self.name} did not start:\n" + "\n".join(self.lines[-20:]))

    def kill(self) -> None:
        """As `kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As the supervisor stops it; the exit code."""
        return self._end(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """The exit code of one that ends by itself."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        code = self._process.wait(timeout_s)
        self.kill()
        return code

    def _end(self, signum: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(signum)
        try:
            return process.wait(60)
        finally:
            process.kill()
            process.wait()
            if process.stderr is not None:
                process.stderr.close()

    def _read(self, process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
        try:
            for line in process.stderr or ():
                self.lines.append(line.rstrip())
                lines.put(line)
        except ValueError:
            return  # closed while reading
