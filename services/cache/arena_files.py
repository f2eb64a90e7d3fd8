"""The arena's files: made, found again after a restart, and their headers kept.

Only tables of headers are mapped here; payloads are mapped by the workers. Files are grown with
`posix_fallocate`: a full file system is an error that can be handled, where a lazy mapping would
kill whoever touches it with SIGBUS.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from finback.shared.errors import ConfigError
from finback.shared.lanes.arena_format import (
    PAGE,
    ExtentHeader,
    SlotHeader,
    SlotState,
    pack_extent,
    parse_extent,
    plan_extent,
    read_slot,
    write_slot,
)
from finback.shared.lanes.probe import PROBE_NAME

# Stands for the writer of a slot whose header cannot be read.
UNKNOWN_OWNER: Final = "?"
_LOCK_NAME: Final = "cache.lock"
_FRESH_PREFIX: Final = ".new-"


@dataclass(frozen=True, slots=True)
class Extent:
    """One open extent: its geometry and its mapped header table."""

    header: ExtentHeader
    table: mmap.mmap


class ArenaFiles:
    """The folder of one stack's arena, owned by one cache process at a time."""

    def __init__(self, folder: Path, *, max_bytes: int, extent_bytes: int) -> None:
        """Makes `folder` (0700) if need be and locks it; ConfigError if another cache holds it."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._extent_bytes = min(extent_bytes, max_bytes)
        self._extents: dict[int, Extent] = {}
        self._claimed_bytes = 0  # for extents that are being made
        self.num_damaged = 0  # headers found by `scan` that made no sense
        self.removed: dict[str, str] = {}  # files that `scan` could not use: name -> why
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            self._lock = _lock(folder / _LOCK_NAME)
        except OSError as error:
            raise ConfigError(f"cannot keep an arena in {folder}: {error.strerror}") from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all extents."""
        return sum(extent.header.file_bytes for extent in self._extents.values())

    def scan(self) -> Iterator[tuple[ExtentHeader, list[SlotHeader]]]:
        """Open what an earlier process left; remove what is no valid extent of this folder."""
        for path in sorted(self.folder.glob(f"{_FRESH_PREFIX}*")):
            path.unlink(missing_ok=True)
        for path in sorted(self.folder.glob("extent-*")):
            try:
                extent = self._open(path)
            except (OSError, ValueError) as error:
                self.removed[path.name] = str(error)
                path.unlink(missing_ok=True)
                continue
            self._extents[extent.header.extent_id] = extent
            yield extent.header, self._read_slots(extent)

    def grow(self, slot_bytes: int, num_slots: int) -> ExtentHeader | None:
        """Add an extent with at least one slot, with room for `num_slots` if that can be had.

        None when the bound or the file system leaves no room.
        """
        with self.claim(slot_bytes, num_slots) as max_bytes:
            made = self.make(slot_bytes, max_bytes)
        if made is None:
            return None
        self.add(made)
        return made.header

    @contextlib.contextmanager
    def claim(self, slot_bytes: int, num_slots: int) -> Iterator[int]:
        """The size that a new extent may have; nobody else may use these bytes meanwhile."""
        room = self._max_bytes - self.num_bytes - self._claimed_bytes
        want = max(self._extent_bytes, 2 * PAGE + (slot_bytes + PAGE) * min(num_slots, 256))
        claimed = max(0, min(want, room))
        self._claimed_bytes += claimed
        try:
            yield claimed
        finally:
            self._claimed_bytes -= claimed

    def make(self, slot_bytes: int, max_bytes: int) -> Extent | None:
        """A new extent, not used before `add`; None as of `grow`. On any thread."""
        # Asked first, because a tmpfs fills all pages before it finds that there are too few.
        space = os.statvfs(self.folder)
        file_bytes = min(max_bytes, space.f_bavail * space.f_frsize)
        while True:
            header = plan_extent(secrets.randbits(40), slot_bytes, file_bytes)
            if header is None:
                return None
            try:
                return self._create(header)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
                    raise
                file_bytes = header.file_bytes // 2

    def add(self, extent: Extent) -> None:
        """Use an extent that was made."""
        self._extents[extent.header.extent_id] = extent

    def drop(self, extent_id: int) -> None:
        """Remove an extent's file. Who has it mapped keeps the memory until it unmaps."""
        extent = self._extents.pop(extent_id)
        (self.folder / extent.header.name).unlink(missing_ok=True)
        extent.table.close()

    def store(self, extent_id: int, index: int, header: SlotHeader) -> None:
        """Write one slot's header into the arena."""
        with memoryview(self._extents[extent_id].table) as table:
            write_slot(table, index, header)

    def load(self, extent_id: int, index: int) -> SlotHeader:
        """Read one slot's header back."""
        with memoryview(self._extents[extent_id].table) as table:
            return read_slot(table, index)

    def extent(self, extent_id: int) -> ExtentHeader:
        """The geometry of an open extent; KeyError if there is none."""
        return self._extents[extent_id].header

    def missing(self) -> list[str]:
        """Files that somebody removed or cut while they were in use, the lock's among them.

        Who has them mapped reads on or finds out; nobody else can come to what they hold.
        """
        sizes = {e.header.name: e.header.file_bytes for e in self._extents.values()}
        found = [name for name, size in sizes.items() if _size(self.folder / name) < size]
        if not _is_file(self._lock, self.folder / _LOCK_NAME):
            found.append(_LOCK_NAME)
        return found

    def write_probe(self) -> str:
        """Draw a nonce and leave it where a peer on this host can read it."""
        nonce = secrets.token_hex(16)
        fresh = self.folder / f"{_FRESH_PREFIX}probe"
        fresh.unlink(missing_ok=True)
        with open(fresh, "x", opener=_private) as file:
            file.write(nonce)
        fresh.rename(self.folder / PROBE_NAME)
        return nonce

    def close(self) -> None:
        """Unmap and unlock; the files stay for the next process."""
        for extent in self._extents.values():
            extent.table.close()
        self._extents.clear()
        os.close(self._lock)

    def _create(self, header: ExtentHeader) -> Extent:
        fresh = self.folder / f"{_FRESH_PREFIX}{header.name}"
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, header.file_bytes)
            table = mmap.mmap(descriptor, header.data_offset)
        except OSError:
            fresh.unlink()
            raise
        finally:
            os.close(descriptor)
        packed = pack_extent(header)
        table[: len(packed)] = packed
        with memoryview(table) as view:
            for index in range(header.num_slots):
                write_slot(view, index, SlotHeader())
        fresh.rename(self.folder / header.name)
        return Extent(header, table)

    def _open(self, path: Path) -> Extent:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            head = os.pread(descriptor, 64, 0)
            header = parse_extent(head, os.fstat(descriptor).st_size)
            if header.name != path.name:
                raise ValueError("an extent under another's name")
            return Extent(header, mmap.mmap(descriptor, header.data_offset))
        finally:
            os.close(descriptor)

    def _read_slots(self, extent: Extent) -> list[SlotHeader]:
        headers = []
        with memoryview(extent.table) as table:
            for index in range(extent.header.num_slots):
                header = _plausible(table, index, extent.header.slot_bytes)
                if header is None:
                    self.num_damaged += 1
                    header = SlotHeader(
                        state=SlotState.QUARANTINED,
                        owner=UNKNOWN_OWNER,
                        lease_id=secrets.token_hex(16),
                        generation=secrets.randbits(62),
                    )
                write_slot(table, index, header)  # in one piece, whatever a kill left half written
                headers.append(header)
        return headers


def _plausible(table: memoryview, index: int, slot_bytes: int) -> SlotHeader | None:
    try:
        header = read_slot(table, index, is_sealed=True)
    except ValueError:
        return None
    if header.state is SlotState.FREE:
        # Other fields may be half written: the state byte, not they, decides.
        return SlotHeader(generation=header.generation)
    if header.length > slot_bytes:
        return None
    if header.state is SlotState.KEPT:
        if header.label is None:
            return None
        return header if header.owner else replace(header, lease_id="")
    return header if header.lease_id and header.owner else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _lock(path: Path, patience_s: float = 3.0) -> int:
    """Hold `path` exclusively while this process lives; a dying predecessor gets a moment."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        if time.monotonic() > deadline:
            os.close(descriptor)
            raise ConfigError(
                f"another cache process holds the arena {path.parent}; stop it, or give this stack "
                "another FINBACK_STACK_ID"
            )
        time.sleep(0.05)
