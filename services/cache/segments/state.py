"""The parts of an open store, put together, and what several of its jobs need."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from finback.services.cache.segments import retention_clock
from finback.services.cache.segments.buffers import BufferPool
from finback.services.cache.segments.database import IndexDamaged
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.eraser import Eraser
from finback.services.cache.segments.folder_lock import FolderLock
from finback.services.cache.segments.index import Index
from finback.services.cache.segments.index_keeper import IndexKeeper
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.options import StoreOptions
from finback.services.cache.segments.packing import Packer
from finback.services.cache.segments.pins import Pins
from finback.services.cache.segments.reader import RecordReader
from finback.services.cache.segments.record import Entry, Miss
from finback.services.cache.segments.recovery import Recovery
from finback.services.cache.segments.segment_table import SegmentTable
from finback.services.cache.segments.writer import SegmentWriter

_MOST_TOUCHED: Final = 65_536
T = TypeVar("T")


class State:
    """Built open; `close` ends it. `writing` and `lock` are those of `index_keeper`."""

    def __init__(
        self, options: StoreOptions, keys: KeyRing, disk: Disk, lock: FolderLock | None, pins: Pins
    ) -> None:
        """`lock` None: the folder cannot be written, and is only read."""
        self.options = options
        self.log = options.log
        self.disk = disk
        self.folder_lock = lock
        self.pool = BufferPool()
        self.paths: dict[int, Path] = {}
        self.read_errors: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.blocked_until_s = 0.0
        packer = Packer(keys, compress=options.compress, encrypt=options.encrypt)
        self.reader = RecordReader(disk, self.pool, keys, packer, self.path_of)
        self.eraser = Eraser(disk, self.pool, keys, self.path_of)
        self.writer = SegmentWriter(
            options.own_folder,
            options.writer,
            keys=keys,
            packer=packer,
            disk=disk,
            pool=self.pool,
            segment_bytes=options.segment_bytes,
            now=options.now,
        )
        self.keeper = IndexKeeper(
            options,
            self._recovery(keys),
            pins,
            is_lasting=lock is not None,
            before_rebuild=self.writer.finish_quietly,
        )
        self.writing, self.lock = self.keeper.writing, self.keeper.lock
        self._clock = retention_clock.start(
            options.now(), options.monotonic(), self.keeper.kept_time()
        )

    def _recovery(self, keys: KeyRing) -> Recovery:
        return Recovery(
            self.options.folder,
            disk=self.disk,
            pool=self.pool,
            keys=keys,
            eraser=None if self.is_read_only else self.eraser,
            prove=self._prove,
            paths=self.paths,
        )

    @property
    def index(self) -> Index:
        """To be used within `run`."""
        return self.keeper.index

    @property
    def table(self) -> SegmentTable:
        """To be used within `run`."""
        return self.keeper.table

    def run(self, work: Callable[[], T]) -> T:
        """Use the index, see `IndexKeeper.run`."""
        return self.keeper.run(work)

    @property
    def is_read_only(self) -> bool:
        """Whether this process may not write here."""
        return self.folder_lock is None

    def path_of(self, segment_id: int) -> Path:
        """The file of a segment. Raises FileNotFoundError for one that is unknown."""
        try:
            return self.paths[segment_id]
        except KeyError:
            raise FileNotFoundError(f"segment {segment_id:x} is gone") from None

    def now(self) -> float:
        """Unix seconds by which blocks expire."""
        with self.lock:
            unix_s, monotonic_s = self.options.now(), self.options.monotonic()
            was_in_doubt = self._clock.doubt_s is not None
            self._clock = retention_clock.advance(self._clock, unix_s, monotonic_s)
            lead = self._clock.doubt_s
            if lead is not None and not was_in_doubt:
                self.log.warning(
                    "the wall clock jumped; blocks expire by the old time for an hour",
                    lead_s=round(lead),
                )
            return self._clock.unix_s

    def take_out(self, entries: Sequence[Entry], reason: str) -> int:
        """Rows whose records are erased, or lie with others; returns how many. Needs `writing`."""
        gone = self.run(lambda: [entry for entry in entries if self.index.remove(entry)])
        for salt in {entry.record.salt for entry in gone}:
            hashes = [entry.record.hash for entry in gone if entry.record.salt == salt]
            self.options.on_removed(salt, hashes)
        self.count("removed", len(gone), reason=reason)
        return len(gone)

    def erase(self, entries: Sequence[Entry], reason: str, *, is_final: bool = False) -> int:
        """Erase own records in their files, then in the index. Needs `writing`. Raises OSError."""
        own = [entry.place for entry in entries if entry.is_own]
        done = self.eraser.erase(own, is_final=is_final) if own and not self.is_read_only else []
        num_gone = self.take_out(entries, reason)
        for one in done:
            if one.hole_bytes:
                self.run(lambda one=one: self.table.add_holes(one.place.segment_id, one.hole_bytes))  # type: ignore[misc]  # a default binds the loop's value
        return num_gone

    def touch(self, entries: Sequence[Entry], now_unix_s: float) -> None:
        """Note uses; written with the next flush."""
        with self.lock:
            if len(self.keeper.touched) < _MOST_TOUCHED:
                self.keeper.touched.update((entry.row_id, now_unix_s) for entry in entries)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """To the metrics, and to `stats`."""
        if amount:
            key = ".".join((name, *labels.values()))
            with self.lock:
                self.counts[key] += int(amount)
            self.options.count(f"finback.cache.files_{name}", amount, **labels)

    def become_reader(self) -> None:
        """Write no more into a folder that was taken over. Needs `writing`."""
        self.folder_lock = None

    def flush(self) -> None:
        """Commit the index. Segments are synced by the caller where that matters."""
        self.keeper.flush(self.now())

    def refresh_others(self) -> None:
        """Read what other writers of the folder appended, if that is wanted. Needs `writing`."""
        if self.options.read_others:
            self.keeper.refresh_others()

    def close(self) -> None:
        """Leave the files to the next process."""
        with self.writing:
            try:
                self.writer.finish()
                self.flush()
                self.keeper.close()
            except (OSError, IndexDamaged) as error:
                self.log.warning("the file tier was not closed cleanly", error=str(error))
                self.keeper.abandon()
            self.reader.close()
            if self.folder_lock is not None:
                self.folder_lock.release()

    def _prove(self, entry: Entry) -> Miss | None:
        try:
            with self.pool.lend(entry.record.length) as out:
                self.reader.read_one(entry, out)
        except Miss as miss:
            return miss
        return None
