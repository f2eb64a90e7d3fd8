"""A small pool of page-aligned buffers, as direct reads and writes need them."""

import contextlib
import ctypes
import mmap
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

_LEAST_BYTES: Final = 64 * 1024
_MOST_KEPT_BYTES: Final = 64 * 1024 * 1024


class BufferPool:
    """Lends buffers; keeps some of them (64 MiB in all) for the next who asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)
        self._kept_bytes = 0

    @contextlib.contextmanager
    def lend(self, num_bytes: int) -> Iterator[memoryview]:
        """A page-aligned view of exactly `num_bytes`, with whatever was in it before."""
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        buffer = self._take(size)
        view = memoryview(buffer)
        part = view[:num_bytes]
        try:
            yield part
        finally:
            part.release()
            view.release()
            self._give(size, buffer)

    def _take(self, size: int) -> mmap.mmap:
        with self._lock:
            if self._free[size]:
                self._kept_bytes -= size
                return self._free[size].pop()
        return mmap.mmap(-1, size)

    def _give(self, size: int, buffer: mmap.mmap) -> None:
        with self._lock:
            if self._kept_bytes + size <= _MOST_KEPT_BYTES:
                self._kept_bytes += size
                self._free[size].append(buffer)
        # Else it is unmapped with its last view.


def is_aligned(view: memoryview, alignment: int) -> bool:
    """Whether the first byte of a writable, contiguous view lies at a multiple of `alignment`."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % alignment == 0
