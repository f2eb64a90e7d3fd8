"""Blocks that a worker thread writes into the files; it may go on after its asker has given up."""

import threading
import time
from typing import TYPE_CHECKING, Self

from finback.services.cache.forgotten import Forgotten
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.ticket import Ticket

if TYPE_CHECKING:
    from finback.services.cache.segments.record import BlockRecord
    from finback.services.cache.segments.store import SegmentStore


class WriteBatch:
    """Some blocks; `write` is called once, in a worker thread, or never."""

    def __init__(
        self,
        jobs: "list[tuple[Ticket, BlockRecord]]",
        reader: ArenaReader,
        forgotten: Forgotten,
    ) -> None:
        self._jobs = jobs
        self._reader = reader
        self._forgotten = forgotten
        # One for the thread, one for whoever deals with what it tells.
        self._mark = forgotten.begin()
        forgotten.begin()
        self._lock = threading.Lock()
        self._is_claimed = False
        self.span_ns = (0, 0)
        """When the thread began and ended; zeros before that."""

    def is_void(self, record: "BlockRecord") -> bool:
        """Whether the block was to be forgotten since this batch was made."""
        tenant = bytes.fromhex(record.tenant)
        return self._forgotten.is_void(self._mark, record.salt, record.hash, tenant)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The asker is done; if no thread has begun, none will."""
        if self._claim():
            self._forgotten.end(self._mark)
        self._forgotten.end(self._mark)

    def _claim(self) -> bool:
        with self._lock:
            is_first, self._is_claimed = not self._is_claimed, True
            return is_first

    def write(self, store: "SegmentStore") -> list[str]:
        """In a worker thread: copy, compare, append."""
        if not self._claim():
            return []
        started = time.time_ns()
        try:
            return [self._write(store, *job) for job in self._jobs]
        finally:
            self.span_ns = started, time.time_ns()
            self._forgotten.end(self._mark)

    def _write(self, store: "SegmentStore", ticket: Ticket, record: "BlockRecord") -> str:
        if self.is_void(record):
            return "forgotten"
        try:
            payload = self._reader.read_now(ticket)
        except CorruptData as error:
            return "corrupt" if error.reason == "checksum" else "given_up"
        is_written = store.put(record, payload)
        if self.is_void(record):  # forgotten while it was written
            store.forget(salt=record.salt, hashes=[record.hash])
            return "forgotten"
        return "written" if is_written else "refused"
