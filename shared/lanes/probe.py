"""Do two processes see the same arena? Found out by reading a nonce, never by comparing names."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

PROBE_NAME: Final = "probe"
_MAX_NONCE_BYTES: Final = 256


def probe(path: str | Path, nonce: str) -> bool:
    """Whether the arena folder `path` of this host is the one whose owner wrote `nonce` there."""
    try:
        with open(Path(path) / PROBE_NAME, "rb") as file:
            return bool(nonce) and file.read(_MAX_NONCE_BYTES) == nonce.encode()
    except OSError:
        return False


def writer_lock_path(folder: Path, owner: str, owner_epoch: int) -> Path:
    """The file that a writer keeps locked while it lives."""
    return folder / f"writer-{owner}.{owner_epoch}"


class WriterLock:
    """Proof of life of a writing process: a file lock that the kernel drops when it dies.

    A stopped process (SIGSTOP) keeps it, so its half-written slots are given to nobody. The lock is
    a shared one, as a process may open its arena twice.
    """

    def __init__(self, folder: Path, owner: str, owner_epoch: int) -> None:
        self._path = writer_lock_path(folder, owner, owner_epoch)
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)
            if _is_at(self._path, self._descriptor):
                return
            os.close(self._descriptor)  # taken for a dead writer's and removed meanwhile

    def is_in(self, folder: Path) -> bool:
        """Whether the lock still stands in `folder`: not when the arena was made anew."""
        return self._path.parent == folder and _is_at(self._path, self._descriptor)

    def close(self) -> None:
        """Say that this process writes no more."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1


def writers(folder: Path) -> list[tuple[str, int]]:
    """(owner, epoch) of every lock file in the arena folder, of the living and of the dead."""
    found = []
    for path in folder.glob("writer-*"):
        owner, _, epoch = path.name.removeprefix("writer-").rpartition(".")
        if owner and epoch.isdecimal():
            found.append((owner, int(epoch)))
    return found


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_writer_dead(folder: Path, owner: str, owner_epoch: int) -> bool | None:
    """True: its lock is free. False: it lives (or is stopped). None: it left no lock file."""
    try:
        descriptor = os.open(writer_lock_path(folder, owner, owner_epoch), os.O_RDWR)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
