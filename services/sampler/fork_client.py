"""Starts the process that holds the vocabulary, and has it fork and kill workers."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from finback.services.sampler.fork_server import COMMAND
from finback.services.sampler.worker_link import WorkerLink, WorkerLost
from finback.shared.errors import ConfigError

LOAD_TIMEOUT_S: Final = 120.0
FORK_TIMEOUT_S: Final = 10.0
_MAX_HELLO_BYTES: Final = 64 * 1024
# One thread each: a process that forks may have no others.
_SINGLE_THREADED: Final = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyFacts:
    """The width of the logits, and the tokens that end an answer."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    @property
    def bitmask_bytes(self) -> int:
        """Of one mask: int32 [ceil(vocab / 32)]."""
        return -(-self.vocab_size // 32) * 4


class ForkClient:
    """The fork server's life; it is started again when it is gone."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False
        self.num_starts = 0

    @property
    def pid(self) -> int:
        """Of the fork server; 0 if it does not run."""
        return self._process.pid if self._process else 0

    async def start(self) -> VocabularyFacts:
        """Load the vocabulary. Raises `ConfigError` if the model cannot be read."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.num_starts += 1
        self._control = ours
        self._process = self._launch(theirs)
        theirs.close()
        told = json.loads(await asyncio.wait_for(_line(ours), LOAD_TIMEOUT_S))
        if "error" in told:
            raise ConfigError(told["error"])
        return VocabularyFacts(vocab_size=told["vocab_size"], eos_ids=tuple(told["eos_ids"]))

    def _launch(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        """On the event loop's own thread: the child ends with the thread that started it."""
        module = "finback.services.sampler.fork_server"
        return subprocess.Popen(
            [sys.executable, "-m", module, self._model, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_SINGLE_THREADED},
            stdin=subprocess.DEVNULL,
        )

    async def fork(self, on_lost: Callable[[WorkerLink], None]) -> WorkerLink:
        """A new worker. Raises `WorkerLost`."""
        ours, theirs = socket.socketpair()
        try:
            if not self._send(b"F", 0, theirs):
                await self._restart()
                if not self._send(b"F", 0, theirs):
                    raise WorkerLost("the grammar workers' parent has ended")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return await WorkerLink.open(ours, on_lost, FORK_TIMEOUT_S)

    def kill(self, link: WorkerLink) -> None:
        """End a worker at once, whatever it is at."""
        if link.pid:
            self._send(b"K", link.pid)
        link.close()

    def close(self) -> None:
        """End the fork server, and with it all workers, for good."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
            self._process = None

    async def _restart(self) -> None:
        async with self._starting:
            if self._process is not None and self._process.poll() is None:
                return  # another caller did it
            if self._is_closed:
                raise WorkerLost("the service stops")
            self._end()
            try:
                await self.start()
            except (ConfigError, ValueError, TimeoutError) as error:
                raise WorkerLost(f"the vocabulary cannot be loaded again: {error}") from error

    def _send(self, command: bytes, pid: int, descriptor: socket.socket | None = None) -> bool:
        if self._control is None or self._process is None or self._process.poll() is not None:
            return False
        descriptors = [] if descriptor is None else [descriptor.fileno()]
        try:
            socket.send_fds(self._control, [COMMAND.pack(command, pid)], descriptors)
        except OSError:
            return False
        return True


async def _line(connection: socket.socket) -> bytes:
    """Bytes up to a line break. Raises `ConfigError` at an end before one."""
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n"):
        part = await loop.sock_recv(connection, 4096)
        if not part or len(line) > _MAX_HELLO_BYTES:
            raise ConfigError("the process that holds the vocabulary has ended; see its messages")
        line += part
    return line
