"""Taking a block in: once, within the quotas, and never at the cost of the caller's patience."""

import errno
from dataclasses import replace
from typing import Final

from finback.services.cache.segments.eviction import Eviction
from finback.services.cache.segments.format import AES_GCM, PAGE, RecordHeader, pages
from finback.services.cache.segments.record import BlockRecord, Entry, Miss, Place
from finback.services.cache.segments.segment_table import Segment
from finback.services.cache.segments.state import State

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# After a failed write, puts are refused for so long or until the next sweep.
BACK_OFF_S: Final = 5.0


class Appending:
    """Puts, and copies of records. Every method needs `writing`."""

    def __init__(self, state: State, eviction: Eviction) -> None:
        self._state = state
        self._eviction = eviction

    def put(self, record: BlockRecord, payload: memoryview) -> bool:
        """Keep a block; False if it is kept already or cannot be."""
        state = self._state
        if state.is_read_only:
            return self._refused("read_only")
        if state.options.monotonic() < state.blocked_until_s:
            return self._refused("backing_off")
        before = state.run(lambda: state.index.get(record.salt, record.hash))
        if before is not None:
            self._prolong(before, record)
            return self._refused("duplicate")
        try:
            longest = pages(record.length) + 2 * PAGE
            if not self._eviction.make_room(longest, record.traffic_class, record.tenant):
                return self._refused("full")
            place, header = self.append(record, payload)
        except Miss:
            state.log.warning("a block does not fit its checksum and is not stored")
            return self._refused("mismatch")
        except OSError as error:
            return self._failed(error)
        kept = hidden(record, header)
        state.run(lambda: self._add(kept, place, is_packed=header.flags != 0))
        state.count("stored")
        # Told under the lock under which removals are: who hears both hears them in their order.
        state.options.on_found(record.salt, [record.hash])
        return True

    def append(self, record: BlockRecord, payload: memoryview) -> tuple[Place, RecordHeader]:
        """Write a record, in a new segment if need be. Raises `Miss` and OSError."""
        writer = self._state.writer
        if writer.needs_segment(record.length):
            self._open_segment()
        return writer.append(record, payload)

    def _open_segment(self) -> None:
        state = self._state
        header = state.writer.open_segment()
        path = state.writer.path
        state.paths[header.segment_id] = path
        segment = Segment(
            segment_id=header.segment_id,
            path=str(path.relative_to(state.options.folder)),
            size=PAGE,
            created_unix_s=header.created_unix_s,
        )
        state.run(lambda: state.table.put(segment))

    def _add(self, record: BlockRecord, place: Place, *, is_packed: bool) -> None:
        index = self._state.index
        # An index that was built again meanwhile found the record by itself.
        if index.get(record.salt, record.hash) is None:
            index.add(record, place, is_packed=is_packed, is_own=True)
            self._state.table.grow(place.segment_id, place.end)
        index.database.commit_if_due()

    def _prolong(self, before: Entry, record: BlockRecord) -> None:
        expires = record.expires_unix_s
        known = before.record.expires_unix_s
        if known and (not expires or expires > known):
            used = record.used_unix_s
            self._state.run(lambda: self._state.index.prolong(before, expires, used))
        self._state.touch([before], self._state.now())

    def _refused(self, reason: str) -> bool:
        self._state.count("refused", reason=reason)
        return False

    def _failed(self, error: OSError) -> bool:
        is_full = error.errno in _FULL
        self._state.blocked_until_s = self._state.options.monotonic() + BACK_OFF_S
        self._state.log.warning(
            "the file tier's disk is full" if is_full else "cannot write to the file tier",
            folder=str(self._state.options.own_folder),
            error=error.strerror or str(error),
        )
        return self._refused("disk_full" if is_full else "io")


def hidden(record: BlockRecord, header: RecordHeader) -> BlockRecord:
    """The record as the index keeps it: without its checksum if that is encrypted."""
    return replace(record, checksum=b"") if header.flags & AES_GCM else record
