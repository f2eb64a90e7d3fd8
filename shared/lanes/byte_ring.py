"""A ring of bytes in shared memory: one process leaves something there, others of its host copy it out.

For what is read once and soon, such as masks. The writer overwrites what lies there longest and waits for
nobody. A reader is told where its bytes lie and their checksum: what was overwritten meanwhile does
not fit that, and is asked for again. A reader shows that it shares the memory by having opened the
ring, so nobody compares the names of hosts.

A ring is a file `<16 hexadecimal digits>.ring`, locked by its writer while that lives; whoever begins a new one
removes those that nobody holds. Its pages are all taken when it is made, so that a tmpfs that
fills up later ends no process.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from finback.shared.errors import Unavailable

RING_BYTES: Final = 4 << 20
_MAX_RING_BYTES: Final = 1 << 30
_SUFFIX: Final = ".ring"
_NAME: Final = re.compile(r"[0-9a-f]{16}")
_MAX_RINGS: Final = 4  # samplers on one host that a reader follows


class Left(NamedTuple):
    """Where bytes lie in a ring: offset, length, and XXH3-64 less its highest bit."""

    offset: int
    num_bytes: int
    checksum: int


def checksum_of(data: bytes | memoryview) -> int:
    """Fits a signed 64-bit field."""
    return xxhash.xxh3_64_intdigest(data) & (2**63 - 1)


class RingWriter:
    """The one writer of a ring. Raises `Unavailable` if there is no memory, or no such folder."""

    def __init__(self, folder: Path, num_bytes: int = RING_BYTES) -> None:
        self.name = secrets.token_hex(8)
        self._num_bytes = num_bytes
        self._next = 0
        self._path = folder / f"{self.name}{_SUFFIX}"
        fresh = folder / f".{self.name}"  # under its own name only once it is locked
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_dead(folder)
            self._fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(f"no ring in {folder}: {error.strerror}", reason="ring") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes)
            fresh.rename(self._path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            os.close(self._fd)
            raise Unavailable(f"no ring in {folder}: {error.strerror}", reason="ring") from error

    def leave(self, data: bytes) -> Left | None:
        """Write `data`; None if it is so long that it would push out what was just left."""
        if len(data) > self._num_bytes // 8:
            return None
        begin = self._next if self._next + len(data) <= self._num_bytes else 0
        self._map[begin : begin + len(data)] = data
        self._next = begin + len(data)
        return Left(begin, len(data), checksum_of(data))

    def close(self) -> None:
        """Remove the ring. Readers keep what they have mapped, and find nothing new in it."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()  # if no other is in it
        self._map.close()
        os.close(self._fd)


class RingReader:
    """Rings that other processes of this host write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: OrderedDict[str, mmap.mmap | None] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """The rings that can be read here."""
        return tuple(name for name, opened in self._maps.items() if opened is not None)

    def meet(self, name: str) -> None:
        """Open a ring that was heard of, if it is on this host. One that cannot be opened is not tried again."""
        if name in self._maps:
            self._maps.move_to_end(name)
            return
        self._maps[name] = _open(self._folder, name)
        while len(self._maps) > _MAX_RINGS:
            _, oldest = self._maps.popitem(last=False)
            if oldest is not None:
                oldest.close()

    def take(self, name: str, left: Left) -> bytes | None:
        """A copy of what was left; None if it is not there (any more)."""
        opened = self._maps.get(name)
        if opened is None or left.offset < 0 or left.num_bytes < 0:
            return None
        found = opened[left.offset : left.offset + left.num_bytes]
        fits = len(found) == left.num_bytes and checksum_of(found) == left.checksum
        return found if fits else None

    def close(self) -> None:
        """Let all rings go."""
        for opened in self._maps.values():
            if opened is not None:
                opened.close()
        self._maps.clear()


def _open(folder: Path, name: str) -> mmap.mmap | None:
    if _NAME.fullmatch(name) is None:
        return None
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(folder / f"{name}{_SUFFIX}", flags)
    except OSError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= _MAX_RING_BYTES:
            return None
        return mmap.mmap(fd, found.st_size, access=mmap.ACCESS_READ)
    except OSError:
        return None
    finally:
        os.close(fd)


def _remove_dead(folder: Path) -> None:
    """Remove rings whose writers are gone."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
