"""A reader's open extents: blocks are copied out of a mapping, piece by piece, and hashed on the way.

Touching a mapping behind the end of its file is a SIGBUS, so the file's length is asked for before
each piece. No part of Finback truncates an extent (one that is dropped is unlinked, and stays whole
for who has it open); the check is for accidents. `pread` would leave no gap at all, but reaches only
0.3 to 0.65 of memcpy, where this reaches 0.7 to 0.8 (docs/LOG.md).
"""

import mmap
import os
import re
from pathlib import Path
from typing import Final

import xxhash

from finback.shared.lanes.arena_format import ExtentHeader, parse_extent, parse_head, table_offset
from finback.shared.lanes.base import CorruptData, copy_bytes

_NAME: Final = re.compile(r"^extent-[0-9a-f]{10}\Z")
_EXTENT_HEAD_BYTES: Final = 64
_SLOT_HEAD_BYTES: Final = 16
# A piece is still in the second-level cache when it is hashed.
PIECE_BYTES: Final = 512 * 1024


class OpenExtent:
    """One extent open for reading; closed when the last user lets go of it.

    Never closed by name: its descriptor's number could serve another file by then.
    """

    def __init__(self, path: Path) -> None:
        """OSError if it is gone, ValueError if it is no extent, or another's."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        file_bytes = os.fstat(self._descriptor).st_size
        head = os.pread(self._descriptor, _EXTENT_HEAD_BYTES, 0)
        self.header: ExtentHeader = parse_extent(head, file_bytes)
        if self.header.name != path.name:
            raise ValueError("an extent under another's name")
        # Never closed by hand: it goes with the last view of it.
        self._data = memoryview(mmap.mmap(self._descriptor, file_bytes, access=mmap.ACCESS_READ))

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", -1)
        if descriptor >= 0:
            os.close(descriptor)

    def slot_head(self, index: int) -> tuple[int, int]:
        """(state, generation) of a slot as it is now; `CorruptData` if that cannot be told."""
        head = os.pread(self._descriptor, _SLOT_HEAD_BYTES, table_offset(index))
        try:
            return parse_head(head)
        except ValueError as error:
            raise CorruptData("generation", f"slot {index} of {self.header.name}") from error

    def copy(self, offset: int, out: memoryview) -> bytes:
        """Fill `out` from `offset` on; the XXH3-128 of what is in `out`, computed on the copy."""
        digest = xxhash.xxh3_128()
        self.copy_into(offset, out, digest)
        return digest.digest()

    def copy_into(self, offset: int, out: memoryview, digest: xxhash.xxh3_128) -> None:
        """As `copy`, for a part of what `digest` covers."""
        for at in range(0, len(out), PIECE_BYTES):
            piece = out[at : at + PIECE_BYTES]
            begin = offset + at
            if os.fstat(self._descriptor).st_size < begin + len(piece):
                raise CorruptData("gone", f"{self.header.name} is shorter than it was")
            copy_bytes(piece, self._data[begin : begin + len(piece)])
            digest.update(piece)


class ArenaReads:
    """The extents of `folder` that were read from. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, OpenExtent] = {}

    def get(self, name: str) -> OpenExtent:
        """The extent called `name`; OSError if it is gone, ValueError if it is no extent."""
        found = self._open.get(name)
        if found is not None:
            return found
        if not _NAME.match(name):
            raise ValueError(f"not the name of an extent: {name[:80]!r}")
        self._prune()
        opened = OpenExtent(self.folder / name)
        return self._open.setdefault(name, opened)

    def close(self) -> None:
        """Let go of all; a read under way keeps what it needs."""
        self._open.clear()

    def _prune(self) -> None:
        for name in list(self._open):
            if not (self.folder / name).exists():
                self._open.pop(name, None)
