"""The index of an open store, and the two locks: opened, used, and built again when it is damaged.

`writing` is held by whatever changes files or takes blocks out; `lock` guards the index and is held
for microseconds. Who needs both takes `writing` first. Reads of payloads hold neither.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from finback.services.cache.segments.database import Database, IndexDamaged, discard
from finback.services.cache.segments.index import Index
from finback.services.cache.segments.options import StoreOptions
from finback.services.cache.segments.pins import Pins
from finback.services.cache.segments.record import BlockRecord
from finback.services.cache.segments.recovered import Recovered, by_salt, describe
from finback.services.cache.segments.recovery import Recovery
from finback.services.cache.segments.segment_table import SegmentTable

INDEX_NAME: Final = "index.sqlite"
_TIME: Final = "time"
_CLEAN: Final = "clean"
T = TypeVar("T")


class IndexKeeper:
    """`index` and `table` may be others after each `run`; hold neither across two of them."""

    def __init__(
        self,
        options: StoreOptions,
        recovery: Recovery,
        pins: Pins,
        *,
        is_lasting: bool,
        before_rebuild: Callable[[], None],
    ) -> None:
        """`is_lasting` False: kept in memory. `before_rebuild` ends the active segment."""
        self.writing = threading.RLock()
        self.lock = threading.RLock()
        self.pins = pins
        self.is_lasting = is_lasting
        self.ignored: dict[str, str] = {}
        self.touched: dict[int, float] = {}
        self._options = options
        self._log = options.log
        self._recovery = recovery
        self._before_rebuild = before_rebuild
        self._database: Database | None = None
        self._open()

    def run(self, work: Callable[[], T]) -> T:
        """Use the index; once more, after it was built again, if it turns out to be damaged.

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

    def kept_time(self) -> float | None:
        """The time of the last commit, if there was one."""
        kept = self.run(lambda: self.table.get_meta(_TIME))
        try:
            return float(kept) if kept else None
        except ValueError:
            return None

    def flush(self, now_unix_s: float) -> None:
        """Commit, with the uses that were noted and the time."""
        self.run(lambda: self._flush(now_unix_s))

    def _flush(self, now_unix_s: float) -> None:
        touched, self.touched = self.touched, {}
        self.index.touch(touched.items())
        self.table.set_meta(_TIME, repr(now_unix_s))
        self.index.database.commit()

    def refresh_others(self) -> None:
        """Read what other writers of the folder appended. Needs `writing`."""
        self.run(self._refresh_others)

    def _refresh_others(self) -> None:
        done = self._catch_up_others()
        self._report([done], "read other writers' segments")
        for salt, hashes in by_salt(done.found).items():
            self._options.on_found(salt, hashes)

    def close(self) -> None:
        """Leave it so that the next open need not doubt it. Raises `IndexDamaged`."""
        with self.lock:
            self.table.set_meta(_CLEAN, "1")
            self.index.database.close()

    def abandon(self) -> None:
        """Close without a commit."""
        if self._database is not None:
            self._database.abandon()

    def _open(self) -> None:
        path = self._options.own_folder / INDEX_NAME if self.is_lasting else None
        try:
            self._use(path)
            if self.table.get_meta(_CLEAN) != "1":
                self.index.database.check()
            self.table.set_meta(_CLEAN, "0")
            self._catch_up("opened the file tier")
        except IndexDamaged as error:
            self._rebuild(error)

    def _use(self, path: Path | None) -> None:
        self.abandon()
        self._database = Database(path)
        self.index = Index(self._database)
        self.table = SegmentTable(self._database)

    def _rebuild(self, damage: IndexDamaged) -> None:
        """A new index from the segments; in memory if its file cannot be written."""
        self._log.warning("the index of the file tier is built again", why=str(damage))
        self._options.count("finback.cache.files_index_rebuilt")
        self.touched.clear()
        self._before_rebuild()
        path = self._options.own_folder / INDEX_NAME
        if self.is_lasting:
            try:
                self.abandon()
                discard(path)
                self._use_and_fill(path)
                return
            except (IndexDamaged, OSError) as error:
                self._log.warning("the index is kept in memory", error=str(error))
                self.is_lasting = False
        self._use_and_fill(None)

    def _use_and_fill(self, path: Path | None) -> None:
        self._use(path)
        self._catch_up("built the index of the file tier")

    def _catch_up(self, event: str) -> None:
        own = self._options.own_folder
        parts = [self._recovery.catch_up(self.index, self.table, own, is_own=True)]
        if self._options.read_others:
            parts.append(self._catch_up_others())
        self.index.set_pins(self.pins)
        self._report(parts, event)
        self.index.database.commit()

    def _catch_up_others(self) -> Recovered:
        whole = Recovered()
        for folder in sorted(self._options.folder.iterdir()):
            if folder.is_dir() and folder != self._options.own_folder:
                whole.add(self._recovery.catch_up(self.index, self.table, folder, is_own=False))
        return whole

    def _report(self, parts: Sequence[Recovered], event: str) -> None:
        for part in parts:
            for name, why in part.ignored.items():
                if self.ignored.get(name) != why:
                    self._log.warning("a segment is left alone", file=name, why=why)
                self.ignored[name] = why
            lost = [entry.record for entry in part.lost if not self._has(entry.record)]
            for salt, hashes in by_salt(lost).items():
                self._options.on_removed(salt, hashes)
        figures = describe(parts)
        if any(figures.values()):
            self._log.info(event, **figures)

    def _has(self, record: BlockRecord) -> bool:
        return self.index.get(record.salt, record.hash) is not None
