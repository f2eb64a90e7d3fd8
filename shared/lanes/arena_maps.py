"""A writer's mappings of arena extents, opened on first use and kept."""

import contextlib
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finback.shared.lanes.arena_format import ExtentHeader, parse_extent

_NAME: Final = re.compile(r"^extent-[0-9a-f]{10}$")


@dataclass(frozen=True, slots=True)
class MappedExtent:
    """One mapped file."""

    header: ExtentHeader
    data: mmap.mmap

    def is_whole(self) -> bool:
        """Whether the file is as long as it was: beyond its end a touch ends in SIGBUS."""
        return self.data.size() >= self.header.file_bytes


class ArenaMaps:
    """Maps extents of `folder` for writing. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, MappedExtent] = {}

    def get(self, name: str) -> MappedExtent:
        """The extent called `name`; OSError if it is gone, ValueError if it is no extent."""
        found = self._maps.get(name)
        if found is not None:
            return found
        if not _NAME.match(name):
            raise ValueError(f"not the name of an extent: {name[:80]!r}")
        self._prune()
        opened = self._open(name)
        return self._maps.setdefault(name, opened)

    def close(self) -> None:
        """Unmap all; a mapping somebody still has a view of goes when the view does."""
        for name in list(self._maps):
            self._unmap(name)

    def _open(self, name: str) -> MappedExtent:
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            file_bytes = os.fstat(descriptor).st_size
            header = parse_extent(os.pread(descriptor, 64, 0), file_bytes)
            return MappedExtent(header, mmap.mmap(descriptor, file_bytes))
        finally:
            os.close(descriptor)

    def _prune(self) -> None:
        for name in list(self._maps):
            if not (self.folder / name).exists():
                self._unmap(name)

    def _unmap(self, name: str) -> None:
        extent = self._maps.pop(name, None)
        if extent is not None:
            with contextlib.suppress(BufferError):
                extent.data.close()
