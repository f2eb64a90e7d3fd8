"""A gateway with the real router and the echo engine, each its own process, on a real server."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[2]
ECHO = str(ROOT / "benchmarks" / "echo_engine.py")
READY_S = 90.0


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class GatewayStack:
    """Processes by name: `router`, `echo`, `gateway`, and more on demand."""

    nats_url: str
    prefix: str
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "GatewayStack":
        """Return when the gateway says that it is ready."""
        for name in ("router", "echo", "gateway"):
            self.spawn(name)
        self.wait_ready()
        return self

    def spawn(self, name: str, **more: str) -> "subprocess.Popen[bytes]":
        """Start one process; its log goes to `<folder>/<name>.log`."""
        module = name.rstrip("0123456789")  # `gateway2` is another gateway
        command = [ECHO] if module == "echo" else ["-m", f"finback.services.{module}"]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FINBACK_")}
        env = {
            **clean,
            "PYTHONPATH": str(ROOT / ".src"),
            "FINBACK_NATS_URL": self.nats_url,
            "FINBACK_SUBJECT_PREFIX": self.prefix,
            "FINBACK_STACK_ID": self.prefix,
            "FINBACK_RUN_DIR": str(self.folder),
            "FINBACK_HTTP_PORT": str(self.port),
            **self.env,
            **more,
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            made = subprocess.Popen([sys.executable, *command], env=env, stderr=log)
        self.processes[name] = made
        return made

    def wait_ready(self) -> None:
        """Wait for `/readyz`."""
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            try:
                with urlopen(f"{self.url}/readyz", timeout=10) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"the gateway is not ready:\n{self.logs()}")

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def kill(self, name: str) -> None:
        """As `kill -9`."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def mend(self) -> None:
        """Start what is missing, wake what is stopped, wait until it is ready."""
        for name in ("router", "echo", "gateway"):
            if name not in self.processes:
                self.spawn(name)
            self.processes[name].send_signal(signal.SIGCONT)
        self.wait_ready()

    def stop(self) -> None:
        """End everything, gateway first."""
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
