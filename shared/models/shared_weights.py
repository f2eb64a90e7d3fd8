"""Packed weights in one file that all engines of a stack map: its pages are in memory once.

The first engine packs and writes (a temporary name, then renamed), the others wait for it and map. The
file is private to its user, named by what its bytes depend on, and checked whole before it is used: one
that is torn or damaged is made anew. A folder keeps one file. Where the file cannot be written an engine
has weights of its own, as without.
"""

import ctypes
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Final

from finback.kernels.compiled import source_digest
from finback.shared.models.cpu_weights import CpuWeights
from finback.shared.models.packed_file import MAGIC, read, write

_SUFFIX: Final = ".packed"
_WAIT_S: Final = 120.0
_POLL_S: Final = 0.02
_LOGGER: Final = logging.getLogger(__name__)


def shared_weights(folder: Path, model_digest: str, pack: Callable[[], CpuWeights]) -> CpuWeights:
    """The weights of a model, mapped from `folder`; `pack` makes them where they are not there yet."""
    path = folder / f"{_key(model_digest)}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(folder):
            found = read(path)
            if found is not None:
                return found
            _replace(path, pack())
            _give_back_memory()
            found = read(path)
    except OSError as error:
        _LOGGER.warning("weights are not shared: %s", error)
        found = None
    return found if found is not None else pack()


def _give_back_memory() -> None:
    """What packing took and freed; glibc would keep it for later. Other libraries lack the call."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _key(model_digest: str) -> str:
    """Of all that the packed bytes depend on: the model, the kernels' sources and set, the packing."""
    digest = blake2b(digest_size=16)
    here = Path(__file__).parent
    for part in (model_digest.encode(), source_digest().encode(), MAGIC):
        digest.update(part + b"\0")
    for name in ("cpu_weights.py", "packed_file.py"):
        digest.update((here / name).read_bytes())
    return digest.hexdigest()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One engine packs at a time. Raises `TimeoutError` when another one does for too long."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{folder} is locked for {_WAIT_S:g} s") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, weights: CpuWeights) -> None:
    """Write beside, rename, and drop what was there for other models or kernels."""
    for old in (*path.parent.glob(f"*{_SUFFIX}"), *path.parent.glob(f"*{_SUFFIX}.tmp")):
        old.unlink(missing_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, suffix=f"{_SUFFIX}.tmp")
    try:
        with os.fdopen(fd, "wb") as file:
            write(file, weights)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
