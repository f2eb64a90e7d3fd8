"""Read a whole file into memory around the page cache, and hash it on the way.

O_DIRECT wants addresses, offsets and lengths in multiples of the device's block: each thread keeps one
aligned buffer, and pieces are copied on from there. File systems without it are read as usual.
"""

import mmap
import os
import threading
from pathlib import Path
from typing import Final

import xxhash

from finback.shared.lanes.base import CorruptData, copy_bytes

# Large enough for disks that answer a request at a time, small enough to stay in the cache.
PIECE_BYTES: Final = 1024 * 1024
_ALIGN: Final = 4096

_kept = threading.local()


def read_and_digest(path: Path, out: memoryview) -> bytes:
    """Fill `out` from a file of exactly that length; its XXH3-128.

    Raises `OSError`, `CorruptData` (`length`) when the file is shorter or longer.
    """
    descriptor, is_direct = _open(path)
    try:
        if os.fstat(descriptor).st_size != len(out):
            raise CorruptData("length", f"{path.name} is not {len(out)} bytes long")
        if is_direct:
            return _read_direct(descriptor, out)
        return _read(descriptor, out)
    finally:
        os.close(descriptor)


def _open(path: Path) -> tuple[int, bool]:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT), True
    except FileNotFoundError:
        raise
    except OSError:  # EINVAL: a tmpfs, or a network file system without it
        return os.open(path, flags), False


def _read_direct(descriptor: int, out: memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = _aligned()
    at = 0
    while at < len(out):
        num_wanted = min(PIECE_BYTES, -(-(len(out) - at) // _ALIGN) * _ALIGN)
        num_read = min(os.preadv(descriptor, [buffer[:num_wanted]], at), len(out) - at)
        if num_read <= 0 or (at + num_read < len(out) and num_read % _ALIGN):
            raise CorruptData("length", "the file became shorter")
        copy_bytes(out[at : at + num_read], buffer[:num_read])
        digest.update(out[at : at + num_read])
        at += num_read
    return digest.digest()


def _read(descriptor: int, out: memoryview) -> bytes:
    digest = xxhash.xxh3_128()
    at = 0
    while at < len(out):
        piece = out[at : at + PIECE_BYTES]
        num_read = os.preadv(descriptor, [piece], at)
        if num_read == 0:
            raise CorruptData("length", "the file became shorter")
        digest.update(piece[:num_read])
        at += num_read
    return digest.digest()


def _aligned() -> memoryview:
    """This thread's buffer; a mapping begins on a page."""
    found: memoryview | None = getattr(_kept, "buffer", None)
    if found is None:
        found = _kept.buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))
    return found
