"""Segment files that are open for reading, shared by threads and bounded in number."""

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finback.services.cache.segments.disk import Disk

_MOST_IDLE: Final = 64


@dataclass(slots=True)
class _Open:
    fd: int
    num_users: int = 0
    is_dropped: bool = False


class OpenFiles:
    """Descriptors by path. One in use stays good, even if its file was removed meanwhile."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, _Open] = OrderedDict()

    @contextlib.contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """A descriptor for reads. Raises OSError."""
        found = self._take(path)
        try:
            yield found.fd
        finally:
            self._give(found)

    def drop(self, path: Path) -> None:
        """Close a file as soon as nobody uses it: it was removed."""
        with self._lock:
            found = self._open.pop(path, None)
            if found is not None:
                self._retire(found)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            for found in self._open.values():
                self._retire(found)
            self._open.clear()

    def _take(self, path: Path) -> _Open:
        with self._lock:
            found = self._open.get(path)
            if found is None:
                found = self._open[path] = _Open(self._disk.open(path))
            self._open.move_to_end(path)
            found.num_users += 1
            self._shrink()
        return found

    def _give(self, found: _Open) -> None:
        with self._lock:
            found.num_users -= 1
            if found.is_dropped and not found.num_users:
                os.close(found.fd)

    def _shrink(self) -> None:
        for path in list(self._open)[: max(0, len(self._open) - _MOST_IDLE)]:
            if not self._open[path].num_users:
                self._retire(self._open.pop(path))

    @staticmethod
    def _retire(found: _Open) -> None:
        found.is_dropped = True
        if not found.num_users:
            os.close(found.fd)
