"""The run directory of one stack: its lock, its state file, logs, traces and secrets (all 0600)."""

import fcntl
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError
from finback.shared.kv.cluster_key import new_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """What `status` tells of one service; `start_time` (psutil's) guards against a reused pid."""

    state: str
    pid: int
    instance: str
    start_time: float = 0.0
    restarts: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """The state file: written by the supervisor at every change, read by every other command."""

    stack_id: str
    supervisor_pid: int
    supervisor_start_time: float
    http: str
    nats: str
    model: str
    shm_dir: str
    ready: bool = False
    nats_pid: int = 0
    nats_start_time: float = 0.0
    trace_dir: str = ""
    started_unix_s: float = 0.0
    services: Mapping[str, ServiceState] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        raw: dict[str, Any] = json.loads(text)
        raw["services"] = {name: ServiceState(**value) for name, value in raw["services"].items()}
        return cls(**raw)


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths under one run directory."""

    root: Path

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def nats(self) -> Path:
        return self.root / "nats"

    @property
    def state_file(self) -> Path:
        return self.root / "stack.json"

    @property
    def lock_file(self) -> Path:
        return self.root / "lock"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def keep_cluster_key(self, config: StackConfig) -> str:
        """The file with the cluster's secret, made here if it is not given (as text or a file)."""
        if config.cluster_key_file and not config.cluster_key:
            return config.cluster_key_file
        path = self.root / "cluster.key"
        if config.cluster_key or not path.exists():
            write_private(path, (config.cluster_key or new_key()) + "\n")
        return str(path)

    def create(self) -> None:
        """Make the folders, closed to other users."""
        try:
            for folder in (self.root, self.logs, self.nats):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.root.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot use run directory {self.root}: {error.strerror}; name another: --run-dir"
            ) from error

    def read_state(self) -> StackState | None:
        """The last state written, or None if there is none that can be read."""
        try:
            return StackState.from_json(self.state_file.read_text())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write_state(self, state: StackState) -> None:
        """Replace the state file in one step, so that no reader sees half of it."""
        write_private(self.state_file, state.to_json())

    def lock(self) -> "Lock":
        """Take the stack's lock, or say who holds it."""
        self.create()
        fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            self.check_free()
            raise ConfigError(f"a stack is just starting or stopping in {self.root}") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return Lock(fd)

    def check_free(self) -> None:
        """Raises `ConfigError` if a stack runs here."""
        holder = self.holder_pid()
        if holder is not None:
            raise ConfigError(
                f"a stack already runs in {self.root} (pid {holder}); stop it with finback down, "
                "or give this one its own --run-dir"
            )

    def holder_pid(self) -> int | None:
        """The pid of the supervisor that holds the lock, or None when no supervisor lives."""
        try:
            fd = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 32, 0).decode(errors="replace").strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(fd)
        return None


class Lock:
    """Held for the life of the supervisor; the kernel releases it whatever way that ends."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        os.close(self._fd)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, in one step."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def start_time(pid: int) -> float:
    """When the process was started (psutil's clock), 0.0 if there is none."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def is_same_process(pid: int, started: float) -> bool:
    """Whether `pid` still is the process that was started then, and not a zombie."""
    try:
        process = psutil.Process(pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return bool(alive and abs(process.create_time() - started) < 1.0)
    except psutil.Error:
        return False


def remains(state: StackState) -> list[tuple[str, int]]:
    """Processes of a stack that still live: (name, pid)."""
    found = {
        service.pid: name
        for name, service in state.services.items()
        if is_same_process(service.pid, service.start_time)
    }
    if is_same_process(state.nats_pid, state.nats_start_time):
        found[state.nats_pid] = "nats"
    return [(name, pid) for pid, name in found.items()]
