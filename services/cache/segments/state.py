"""The parts of an open store, and the two locks that keep them in step.

`writing` is held by whatever changes files or takes blocks out; `lock` guards the index and is held
for microseconds. Who needs both takes `writing` first. Reads of payloads hold neither.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from finback.services.cache.segments import retention_clock
from finback.services.cache.segments.buffers import BufferPool
from finback.services.cache.segments.database import Database, IndexDamaged, discard
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.eraser import Eraser
from finback.services.cache.segments.folder_lock import FolderLock
from finback.services.cache.segments.index import Index
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.options import StoreOptions
from finback.services.cache.segments.packing import Packer
from finback.services.cache.segments.pins import Pins
from finback.services.cache.segments.reader import RecordReader
from finback.services.cache.segments.record import Entry, Miss
from finback.services.cache.segments.recovery import Recovered, Recovery, describe
from finback.services.cache.segments.segment_table import SegmentTable
from finback.services.cache.segments.writer import SegmentWriter

INDEX_NAME: Final = "index.sqlite"
_MOST_TOUCHED: Final = 65_536
_TIME: Final = "time"
_CLEAN: Final = "clean"
T = TypeVar("T")


class State:
    """Built open; `close` ends it."""

    def __init__(
        self, options: StoreOptions, keys: KeyRing, disk: Disk, lock: FolderLock | None, pins: Pins
    ) -> None:
        """`lock` None: the folder cannot be written, and is only read."""
        self.options = options
        self.log = options.log
        self.disk = disk
        self.pins = pins
        self.folder_lock = lock
        self.writing = threading.RLock()
        self.lock = threading.RLock()
        self.pool = BufferPool()
        self.paths: dict[int, Path] = {}
        self.touched: dict[int, float] = {}
        self.read_errors: Counter[int] = Counter()
        self.counts: Counter[str] = Counter()
        self.ignored: dict[str, str] = {}
        self.blocked_until_s = 0.0
        self.is_index_lasting = lock is not None
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
        self._recovery = Recovery(
            options.folder,
            disk=disk,
            pool=self.pool,
            keys=keys,
            eraser=self.eraser if lock else None,
            prove=self._prove,
            paths=self.paths,
        )
        self._open_index()
        kept = self.table.get_meta(_TIME)
        self._clock = retention_clock.start(
            options.now(), options.monotonic(), float(kept) if kept else None
        )

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

    def run(self, work: Callable[[], T]) -> T:
        """Use the index; once, after it was built again, if it turns out to be damaged.

        Not to be called with `lock` held. Raises `IndexDamaged` if that did not help.
        """
        with self.lock:
            used = self.index
            try:
                return work()
            except IndexDamaged as error:
                damage = error
        with self.writing, self.lock:
            if self.index is used:
                self._rebuild(damage)
            return work()

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

    def touch(self, entry: Entry, now_unix_s: float) -> None:
        """Note a use; written with the next flush."""
        with self.lock:
            if len(self.touched) < _MOST_TOUCHED:
                self.touched[entry.row_id] = now_unix_s

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
        now = self.now()
        self.run(lambda: self._flush(now))

    def _flush(self, now_unix_s: float) -> None:
        touched, self.touched = self.touched, {}
        self.index.touch(touched.items())
        self.table.set_meta(_TIME, repr(now_unix_s))
        self.index.database.commit()

    def refresh_others(self) -> None:
        """Read what other writers of the folder appended. Needs `writing`."""
        if self.options.read_others:
            self.run(
                lambda: self._report([self._catch_up_others()], "read other writers' segments")
            )

    def close(self) -> None:
        """Leave the files to the next process."""
        with self.writing:
            try:
                self.writer.finish()
                self.flush()
                with self.lock:
                    self.table.set_meta(_CLEAN, "1")
                    self.index.database.close()
            except (OSError, IndexDamaged) as error:
                self.log.warning("the file tier was not closed cleanly", error=str(error))
                self.index.database.abandon()
            self.reader.close()
            if self.folder_lock is not None:
                self.folder_lock.release()

    # --- the index

    def _open_index(self) -> None:
        path = self.options.own_folder / INDEX_NAME if self.is_index_lasting else None
        try:
            self._use(Database(path))
            if self.table.get_meta(_CLEAN) != "1":
                self.index.database.check()
            self.table.set_meta(_CLEAN, "0")
            self._catch_up("opened the file tier")
        except IndexDamaged as error:
            self._rebuild(error)

    def _use(self, database: Database) -> None:
        try:
            self.index = Index(database)
            self.table = SegmentTable(database)
        except BaseException:
            database.abandon()
            raise

    def _rebuild(self, damage: IndexDamaged) -> None:
        """A new index from the segments; in memory if its file cannot be written."""
        self.log.warning("the index of the file tier is built again", why=str(damage))
        self.options.count("finback.cache.files_index_rebuilt")
        if getattr(self, "index", None) is not None:
            self.index.database.abandon()
        self.touched.clear()
        self.writer.finish_quietly()
        for path in (self.options.own_folder / INDEX_NAME, None):
            if path is not None and not self.is_index_lasting:
                continue
            try:
                if path is not None:
                    discard(path)
                self._use(Database(path))
                self._catch_up("built the index of the file tier")
                return
            except (IndexDamaged, OSError) as error:
                self.log.warning("the index is kept in memory", error=str(error))
                self.is_index_lasting = False
        raise damage

    def _catch_up(self, event: str) -> None:
        own = self._recovery.catch_up(self.index, self.table, self.options.own_folder, is_own=True)
        parts = [own]
        if self.options.read_others:
            parts.append(self._catch_up_others())
        self.index.set_pins(self.pins)
        self._report(parts, event)
        self.index.database.commit()

    def _catch_up_others(self) -> Recovered:
        whole = Recovered()
        for folder in sorted(self.options.folder.iterdir()):
            if folder.is_dir() and folder != self.options.own_folder:
                whole.add(self._recovery.catch_up(self.index, self.table, folder, is_own=False))
        return whole

    def _report(self, parts: Sequence[Recovered], event: str) -> None:
        for part in parts:
            for name, why in part.ignored.items():
                if self.ignored.get(name) != why:
                    self.log.warning("a segment is left alone", file=name, why=why)
                self.ignored[name] = why
            for entry in part.lost:
                self.options.on_removed(entry.record.salt, [entry.record.hash])
        figures = describe(parts)
        if any(figures.values()):
            self.log.info(event, **figures)

    def _prove(self, entry: Entry) -> Miss | None:
        try:
            with self.pool.lend(entry.record.length) as out:
                self.reader.read_one(entry, out)
        except Miss as miss:
            return miss
        return None
