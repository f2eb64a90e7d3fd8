"""One writer for each folder: a lock of the kernel, and a lease that other hosts can read.

`flock` ends with its process, but on some network file systems it holds on one host only. So the
file also says who writes, and is written again with every sweep; another host's name that is fresh
refuses the start, and a writer that finds another's nonce in it stops writing.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any, Final

from finback.shared.errors import ConfigError

LEASE_S: Final = 60.0


class FolderLock:
    """Held from the start to `release`."""

    def __init__(self, path: Path, now_unix_s: float) -> None:
        """Raises `ConfigError` if somebody else holds it, OSError if it cannot be written."""
        self._path = path
        self._nonce = secrets.token_hex(8)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process ({self._holder()}) writes to {path.parent}; "
                    "give each cache instance a writer name of its own"
                ) from None
            self._refuse_other_host(now_unix_s)
            self._write(now_unix_s)
        except BaseException:
            os.close(self._fd)
            raise

    def renew(self, now_unix_s: float) -> bool:
        """Say that we still write; False once another writer took over."""
        if self._read().get("nonce") not in (None, self._nonce):
            return False
        self._write(now_unix_s)
        return True

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still the one that was locked: its folder may have been removed."""
        try:
            return os.path.samestat(os.fstat(self._fd), self._path.stat())
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a network file system that is away is not gone

    def release(self) -> None:
        """Let the next one in."""
        try:
            if self._read().get("nonce") == self._nonce:
                os.ftruncate(self._fd, 0)
        except OSError:
            pass  # the lease runs out by itself
        os.close(self._fd)

    def _refuse_other_host(self, now_unix_s: float) -> None:
        found = self._read()
        renewed = found.get("renewed_unix_s")
        if found.get("host") in (None, socket.gethostname()) or not isinstance(renewed, float):
            return
        age_s = now_unix_s - renewed
        if abs(age_s) < LEASE_S:
            raise ConfigError(
                f"host {found['host']} writes to {self._path.parent} ({age_s:.0f} s ago); give each"
                f" cache instance a writer name of its own, or wait {LEASE_S:.0f} s if it is gone"
            )

    def _holder(self) -> str:
        found = self._read()
        return f"process {found.get('pid', '?')} on {found.get('host', '?')}"

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, now_unix_s: float) -> None:
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "nonce": self._nonce,
            "renewed_unix_s": float(now_unix_s),
        }
        data = json.dumps(about).encode()
        try:
            os.pwrite(self._fd, data, 0)
            os.ftruncate(self._fd, len(data))
        except OSError as error:
            # A full disk must not keep us from making room on it; `flock` holds all the same.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
