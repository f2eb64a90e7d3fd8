"""The few system calls of the file tier, so that faults can be put in at one place."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_MOST_VECTORS: Final = 1024
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Disk:
    """Reads and writes whole pages, past the page cache where the file system allows it.

    `direct`: try O_DIRECT. `punch`: give the room of dead records back as holes, where possible.
    """

    def __init__(self, *, direct: bool = True, punch: bool = True) -> None:
        self.is_direct = direct and hasattr(os, "O_DIRECT")
        self.can_punch = punch

    def open(self, path: Path, *, is_writer: bool = False) -> int:
        """A descriptor for page-aligned reads (and writes). Raises OSError."""
        flags = (os.O_RDWR if is_writer else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        return self._open(path, flags)

    def create(self, path: Path) -> int:
        """A new file that only its owner reads."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)

    def _open(self, path: Path, flags: int) -> int:
        if self.is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Some file systems make the file before they refuse.
                flags &= ~os.O_EXCL
                self.is_direct = False
        return os.open(path, flags, 0o600)

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """Fill page-aligned `views` one after another from `offset`; returns bytes read."""
        total = 0
        for start in range(0, len(views), _MOST_VECTORS):
            part = list(views[start : start + _MOST_VECTORS])
            wanted = sum(view.nbytes for view in part)
            found = self._read_part(fd, part, offset + total)
            total += found
            if found < wanted:
                break
        return total

    def _read_part(self, fd: int, views: list[memoryview], offset: int) -> int:
        total = 0
        while views:
            found = self._preadv(fd, views, offset + total)
            if not found:
                break
            total += found
            # A direct read that ends within a page has met the end of the file.
            if self.is_direct and found % 4096:
                break
            views = _rest(views, found)
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, total, os.POSIX_FADV_DONTNEED)
        return total

    def _preadv(self, fd: int, views: list[memoryview], offset: int) -> int:
        try:
            return os.preadv(fd, views, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self.is_direct:
                raise
            self._give_up_direct(fd)
            return os.preadv(fd, views, offset)

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        """Write all of `view`. Raises OSError; some of it may have been written then."""
        done = 0
        while done < view.nbytes:
            try:
                done += os.pwrite(fd, view[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise
                self._give_up_direct(fd)

    def _give_up_direct(self, fd: int) -> None:
        """Go on through the page cache, on a file system that opens so but does not read so."""
        self.is_direct = False
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        """Turn a range into a hole that reads as zeros; False where that cannot be done."""
        if not self.can_punch or length <= 0:
            return False
        found = _libc.fallocate(
            fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(length)
        )
        if found == 0:
            return True
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
        self.can_punch = False
        return False

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Wait until the bytes are on the device."""
        os.fdatasync(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is gone is fine."""
        path.unlink(missing_ok=True)


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    for at, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[at + 1 :]]
        done -= view.nbytes
    return []
