"""Making the index and the segments agree: at the start, after damage, and for other writers' files.

The index may be lost, older or newer than the segments. For each segment it holds up to where its
records were read: what lies behind is scanned, what no longer exists is taken out.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from finback.services.cache.segments.buffers import BufferPool
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.eraser import Eraser
from finback.services.cache.segments.format import (
    AES_GCM,
    PAGE,
    DeadHeader,
    ForeignSegment,
    RecordHeader,
    SegmentHeader,
    segment_name,
)
from finback.services.cache.segments.index import Index
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.record import Entry, Miss, Place
from finback.services.cache.segments.recovered import Recovered
from finback.services.cache.segments.scan import Found, read_header, scan
from finback.services.cache.segments.segment_table import Segment, SegmentTable

# So many bytes at the end of what was appended since the last commit are compared with their
# checksums at once: that is where a crash leaves a torn record. All others are when they are read.
_PROOF_BYTES: Final = 64 * 1024 * 1024


class Recovery:
    """Catches up one folder after another with what lies in it."""

    def __init__(
        self,
        root: Path,
        *,
        disk: Disk,
        pool: BufferPool,
        keys: KeyRing,
        eraser: Eraser | None,
        prove: Callable[[Entry], Miss | None],
        paths: dict[int, Path],
    ) -> None:
        """`prove` reads a record and compares it; `eraser` None: nothing is written.

        `paths` is kept: the file of each segment that is read.
        """
        self._root = root
        self._disk = disk
        self._pool = pool
        self._keys = keys
        self._eraser = eraser
        self._prove = prove
        self._paths = paths

    def catch_up(
        self, index: Index, table: SegmentTable, folder: Path, *, is_own: bool
    ) -> Recovered:
        """Bring the index to what lies in a folder. Raises `IndexDamaged`."""
        done = Recovered()
        below = str(folder.relative_to(self._root))
        known = {
            s.path: s for s in table.all(index.live_bytes) if str(Path(s.path).parent) == below
        }
        paths = {str(path.relative_to(self._root)): path for path in folder.glob("seg-*.kv")}
        for name in known.keys() - paths.keys():
            # First, so that copies elsewhere are not taken for second ones.
            self._forget(index, table, known[name].segment_id, done)
        for name, path in sorted(paths.items()):
            try:
                self._catch_up_file(index, table, path, known.get(name), is_own, done)
            except (ForeignSegment, OSError) as error:
                done.ignored[name] = str(error)
                if name in known:
                    self._forget(index, table, known[name].segment_id, done)
        return done

    def _forget(self, index: Index, table: SegmentTable, segment_id: int, done: Recovered) -> None:
        """Take out what the index says of a segment."""
        for entry in index.of_segment(segment_id):
            if index.remove(entry):
                done.num_lost += 1
                done.lost.append(entry)
        table.remove(segment_id)
        self._paths.pop(segment_id, None)

    def _catch_up_file(
        self, index: Index, table: SegmentTable, path: Path, segment: Segment | None,
        is_own: bool, done: Recovered,
    ) -> None:  # fmt: skip
        fd = self._disk.open(path, is_writer=is_own and self._eraser is not None)
        try:
            header = read_header(self._disk, self._pool, fd, self._keys.key_id)
            if segment_name(header.segment_id) != path.name:
                raise ForeignSegment("it stands under another's name")
            size = os.fstat(fd).st_size
            self._claim(header.segment_id, path)
            if segment is not None and size == segment.size:
                return
            done.num_segments += 1
            if segment is None or size < segment.size:
                # Cut, or never seen: nothing that is known of it can be relied on.
                self._forget(index, table, header.segment_id, done)
                self._paths[header.segment_id] = path
                segment = self._new(path, header, is_own)
            self._read_tail(index, table, fd, segment, done)
        finally:
            os.close(fd)

    def _claim(self, segment_id: int, path: Path) -> None:
        other = self._paths.get(segment_id, path)
        if other != path and other.exists():
            raise ForeignSegment(f"it is a copy of {other}")
        self._paths[segment_id] = path

    def _new(self, path: Path, header: SegmentHeader, is_own: bool) -> Segment:
        return Segment(
            segment_id=header.segment_id,
            path=str(path.relative_to(self._root)),
            size=PAGE,
            created_unix_s=header.created_unix_s,
            is_own=is_own,
        )

    def _read_tail(
        self, index: Index, table: SegmentTable, fd: int, segment: Segment, done: Recovered
    ) -> None:
        found = list(scan(self._disk, self._pool, fd, self._keys, segment.segment_id, segment.size))
        end = found[-1].place.end if found else segment.size
        # A segment that is read from its start has its last record proved, or it would take hours.
        proved = end - _PROOF_BYTES if segment.size > PAGE else end - 1
        kept_end = segment.size
        holes = segment.holes
        for one in found:
            if isinstance(one.header, DeadHeader):
                holes += one.place.span - PAGE if one.header.is_hole else 0
                kept_end = one.place.end
            elif self._take(index, one, one.header, segment, proved, done):
                kept_end = one.place.end
            elif segment.is_own:
                kept_end, holes = one.place.end, holes + self._refuse(one.place)
        if segment.is_own and self._eraser is not None:
            self._cut(fd, kept_end, done)
        table.put(replace(segment, size=kept_end, holes=holes))

    def _refuse(self, place: Place) -> int:
        """Mark a record dead; returns how many bytes of room that gave back."""
        if self._eraser is None:
            return 0
        try:
            return sum(one.hole_bytes for one in self._eraser.erase([place], is_final=False))
        except OSError:
            return 0  # it is not in the index all the same

    def _take(
        self, index: Index, found: Found, header: RecordHeader, segment: Segment, proved: int,
        done: Recovered,
    ) -> bool:  # fmt: skip
        """Add a record; False if it must not be. Those that end behind `proved` are read."""
        record = header.record
        before = index.get(record.salt, record.hash)
        if before is not None and self._prove(before) is None:
            return not segment.is_own  # a second copy, as a crash during compaction leaves it
        entry = Entry(
            row_id=0,
            record=record,
            place=found.place,
            is_packed=header.flags != 0,
            is_own=segment.is_own,
        )
        miss = self._prove(entry) if found.place.end > proved else None
        if miss is not None and miss.reason != "io":  # a device may be better tomorrow
            done.num_torn += 1
            return False
        if before is not None:
            index.remove(before)
        stored = replace(record, checksum=b"") if header.flags & AES_GCM else record
        index.add(stored, found.place, is_packed=entry.is_packed, is_own=segment.is_own)
        done.num_added += 1
        if not segment.is_own:
            done.found.append(record)
        return True

    def _cut(self, fd: int, end: int, done: Recovered) -> None:
        if os.fstat(fd).st_size > end:
            done.num_torn += 1
            with contextlib.suppress(OSError):
                self._disk.truncate(fd, end)
