"""The one folder in which exported prefixes are written and imported ones are looked for.

Whoever may ask a cache could otherwise have it read and write any file that its process can. Files
are named by a single plain part, and links are not followed.
"""

import os
import re
import stat
from pathlib import Path
from typing import BinaryIO, Final

from finback.shared.config import StackConfig
from finback.shared.errors import InvalidRequest

_NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def exchange_folder(config: StackConfig) -> Path:
    """Where it is: `cache_exchange_dir`, or `exchange` in the stack's folder."""
    return Path(config.cache_exchange_dir or Path(config.run_dir) / "exchange").absolute()


class ExchangeFolder:
    """Opens files of the folder by name. OSErrors are the caller's to tell."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def name_of(self, path: str) -> str:
        """The name of a file of the folder, given alone or behind the folder's path."""
        given = Path(path)
        is_here = given.parent in (Path(), self.folder)
        if not is_here or not _NAME.match(given.name) or "\0" in path:
            raise InvalidRequest(
                f"prefixes are exchanged in {self.folder} only (cache_exchange_dir), by names of "
                f"letters, digits and ._- (at most 128); not by {path[:200]!r}",
                param="path",
            )
        return given.name

    def create(self, name: str) -> BinaryIO:
        """A new file (0600), in a folder that is made (0700) if need be."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(self._open(name, _NEW), "wb")

    def open(self, name: str) -> BinaryIO:
        """A file to read. InvalidRequest if it is a folder, a pipe or the like."""
        descriptor = self._open(name, _OLD)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InvalidRequest(f"{self.folder / name} is no plain file", param="path")
        return open(descriptor, "rb")

    def remove(self, name: str) -> None:
        """Remove a file that was not finished."""
        (self.folder / name).unlink(missing_ok=True)

    def _open(self, name: str, flags: int) -> int:
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.open(name, flags, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
