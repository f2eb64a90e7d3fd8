"""`SegmentStore`: the file tier as a library. Synchronous and thread-safe; calls may wait for disks.

    folder/<writer>/index.sqlite, lock, pins.json, seg-<id>.kv      one sub-folder for each writer

A block is kept once, under (salt, hash). What cannot be read is a `Miss`, never an error of the
request, and what was damaged is never returned.
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from finback.services.cache.segments import exchange, pinning, scrub
from finback.services.cache.segments.appending import Appending
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.eviction import Eviction
from finback.services.cache.segments.folder_lock import FolderLock
from finback.services.cache.segments.forgetting import forget
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.lookups import Lookups, check_batch, first_or_raise
from finback.services.cache.segments.options import (
    SEGMENT_BYTES,
    Count,
    OnRemoved,
    StoreOptions,
    ignore_count,
    ignore_names,
)
from finback.services.cache.segments.pins import Pins
from finback.services.cache.segments.reader import Outcome
from finback.services.cache.segments.record import BlockRecord, Miss, check_record
from finback.services.cache.segments.state import State
from finback.services.cache.segments.stats import StoreStats, stats
from finback.services.cache.segments.sweeping import Sweeping, Swept
from finback.shared.clock import monotonic_s, unix_s
from finback.shared.errors import ConfigError, InvalidRequest, Unavailable
from finback.shared.telemetry.logging import get_logger

_CANNOT_WRITE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)


class SegmentStore:
    """Open it before use; `close` it at the end. See `StoreOptions` for the settings."""

    def __init__(
        self,
        folder: str | Path,
        *,
        max_bytes: int,
        cluster_key: bytes,
        writer: str = "local",
        tenant_bytes: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        compact_bytes_s: int = 64 * 1024 * 1024,
        compress: bool = False,
        encrypt: bool = False,
        direct: bool = True,
        read_others: bool = False,
        now: Callable[[], float] = unix_s,
        monotonic: Callable[[], float] = monotonic_s,
        log: Any = None,
        count: Count = ignore_count,
        on_removed: OnRemoved = ignore_names,
        on_found: OnRemoved = ignore_names,
        disk: Disk | None = None,
    ) -> None:
        """Raises `ConfigError`. `writer`: a name of its own for each process that shares the folder."""
        self._options = StoreOptions(
            folder=Path(folder),
            writer=writer,
            max_bytes=max_bytes,
            tenant_bytes=tenant_bytes,
            segment_bytes=segment_bytes,
            compact_bytes_s=compact_bytes_s,
            compress=compress,
            encrypt=encrypt,
            direct=direct,
            read_others=read_others,
            now=now,
            monotonic=monotonic,
            log=log if log is not None else get_logger(__name__),
            count=count,
            on_removed=on_removed,
            on_found=on_found,
        )
        self._cluster_key = cluster_key
        self._disk = disk or Disk(direct=direct)
        self._opened: State | None = None

    # --- life

    def open(self) -> None:
        """Take the folder, and bring index and segments together. Raises `ConfigError`."""
        folder = self._options.own_folder
        lock = self._lock(folder)
        try:
            pinned = pinning.load(self._options)
            state = State(self._options, KeyRing(self._cluster_key), self._disk, lock, pinned)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        self._opened = state
        self._lookups = Lookups(state)
        self._eviction = Eviction(state)
        self._appending = Appending(state, self._eviction)
        self._sweeping = Sweeping(state, self._eviction, self._appending)

    def _lock(self, folder: Path) -> FolderLock | None:
        try:
            self._options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            return FolderLock(folder / "lock", self._options.now())
        except OSError as error:
            if error.errno in _CANNOT_WRITE and self._options.folder.is_dir():
                self._options.log.warning(
                    "the file tier cannot be written; it is only read", error=str(error)
                )
                return None
            raise ConfigError(f"cannot use file tier {folder}: {error.strerror or error}") from None

    def close(self) -> None:
        """Finish and commit; the next open needs no scan. Nothing else may be called after it."""
        state, self._opened = self._opened, None
        if state is not None:
            state.close()

    @property
    def _state(self) -> State:
        if self._opened is None:
            raise Unavailable("the file tier is not open")
        return self._opened

    # --- blocks

    def put(self, record: BlockRecord, payload: memoryview | bytes) -> bool:
        """Keep a block; True if it is newly stored, False if it was there or cannot be taken.

        `payload` is copied and compared with `record.checksum`; it may change during the call.
        Raises `InvalidRequest`.
        """
        view = memoryview(payload).cast("B")
        check_record(record, view.nbytes)
        state = self._state
        with state.writing:
            return self._appending.put(record, view)

    def lookup(self, salt: str, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash whether it is there and not expired."""
        self._state  # noqa: B018  # raises if the store is closed
        return self._lookups.has(salt, hashes)

    def find(self, salt: str, hashes: Sequence[bytes]) -> list[BlockRecord | None]:
        """What is known of each block: its length before it is read. None if it is not there."""
        self._state  # noqa: B018  # raises if the store is closed
        found = self._lookups.find(salt, hashes)
        return [None if isinstance(entry, Miss) else entry.record for entry in found]

    def read_into(self, salt: str, hash: bytes, out: memoryview) -> BlockRecord:  # as in records
        """Fill the front of `out` with a block's payload. Raises `Miss`; `out` means nothing then.

        Fastest with `out` at a multiple of 4096.
        """
        return first_or_raise(self.read_many(salt, [hash], [out]))

    def read_many(
        self, salt: str, hashes: Sequence[bytes], outs: Sequence[memoryview]
    ) -> list[Outcome]:
        """Read blocks, neighbours with one call to the disk; a `Miss` stands where one failed."""
        check_batch(hashes, outs)
        self._state  # noqa: B018  # raises if the store is closed
        return self._lookups.read(salt, hashes, outs)

    def touch(self, salt: str, hashes: Sequence[bytes]) -> None:
        """Note that blocks were of use (elsewhere, say in memory)."""
        state = self._state
        now = state.now()
        found = self._lookups.find(salt, hashes)
        state.touch([entry for entry in found if not isinstance(entry, Miss)], now)

    def records(self) -> Iterator[BlockRecord]:
        """All blocks that can be read here; what changes meanwhile may be among them or not."""
        state, last = self._state, 0
        while entries := state.run(lambda: state.index.after(last)):  # noqa: B023  # runs at once
            yield from (entry.record for entry in entries)
            last = entries[-1].row_id

    # --- upkeep

    def forget(
        self,
        *,
        tenant: str | None = None,
        salt: str | None = None,
        hashes: Sequence[bytes] | None = None,
        everything: bool = False,
    ) -> int:
        """Erase all blocks that fit what is given, pinned or not; returns how many.

        When it returns, their bytes are wiped on the disk. Raises `Unavailable` if that failed.
        """
        if (tenant is None and salt is None and hashes is None) != everything:
            raise InvalidRequest("say whose blocks, or everything", param="everything")
        return forget(self._state, tenant=tenant, salt=salt, hashes=hashes)

    def pin(self, name: str, salt: str, hashes: Sequence[bytes]) -> None:
        """Keep these blocks until `unpin`, whether they are there yet or not."""
        pinning.pin(self._state, name, salt, tuple(hashes))

    def unpin(self, name: str) -> bool:
        """Let go of a pin; False if there is none of that name."""
        return pinning.unpin(self._state, name)

    def pins(self) -> Pins:
        """Name -> (salt, hashes)."""
        return dict(self._state.keeper.pins)

    def sweep(self) -> Swept:
        """Expiry, quota, compaction, commit: to be called every few seconds. Logs its failures."""
        self._state  # noqa: B018  # raises if the store is closed
        return self._sweeping.sweep()

    def verify(self) -> Iterator[scrub.Progress]:
        """Read everything again and let go of what is damaged; goes on as it is asked for more."""
        return scrub.verify(self._state)

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` unless the index agrees with itself and the segments."""
        scrub.check_integrity(self._state)

    def stats(self) -> StoreStats:
        """How full it is, for whom, and what happened."""
        return stats(self._state)

    # --- between clusters

    def export(self, salt: str, hashes: Sequence[bytes], file: BinaryIO, *, block_size: int) -> int:
        """Write the leading run of a prompt's blocks; returns how many. See `exchange_format`."""
        return exchange.export(self._state, self._lookups, salt, hashes, file, block_size)

    def import_(
        self,
        file: BinaryIO,
        *,
        cache_salt: str = "",
        tenant: str | None = None,
        traffic_class: str | None = None,
        expires_unix_s: float = 0.0,
    ) -> tuple[str, list[bytes]]:
        """Store an exported prefix under this cluster's hashes; returns (salt, hashes)."""
        return exchange.import_(
            self._state,
            self._appending,
            file,
            self._cluster_key,
            cache_salt=cache_salt,
            tenant=tenant,
            traffic_class=traffic_class,
            expires_unix_s=expires_unix_s,
        )
