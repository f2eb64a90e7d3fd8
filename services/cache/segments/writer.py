"""Appending records to the active segment, and opening the next one."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

import xxhash

from finback.services.cache.segments.buffers import BufferPool
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.format import (
    PAGE,
    RecordHeader,
    SegmentHeader,
    pack_record,
    pack_segment,
    seal_page,
    segment_name,
)
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.packing import Packer
from finback.services.cache.segments.record import BlockRecord, Miss, Place

_MOST_OVERHEAD: Final = 2 * PAGE


class SegmentWriter:
    """One writer's active segment. Not thread-safe.

    A segment is never appended to again after a restart or a failed write: the next record opens a
    new one, so that a position is written once.
    """

    def __init__(
        self,
        folder: Path,
        writer: str,
        *,
        keys: KeyRing,
        packer: Packer,
        disk: Disk,
        pool: BufferPool,
        segment_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._writer = writer
        self._keys = keys
        self._packer = packer
        self._disk = disk
        self._pool = pool
        self._segment_bytes = segment_bytes
        self._now = now
        self._fd = -1
        self._path = folder
        self.segment: SegmentHeader | None = None
        self.size = 0

    @property
    def path(self) -> Path:
        """The file of the active segment, or of the last one."""
        return self._path

    def needs_segment(self, num_bytes: int) -> bool:
        """Whether a payload of this length has to go to a new segment."""
        longest = num_bytes + _MOST_OVERHEAD
        return self.segment is None or (
            self.size > PAGE and self.size + longest > self._segment_bytes
        )

    def open_segment(self) -> SegmentHeader:
        """Finish the active segment and begin the next. Raises OSError."""
        self.finish()
        segment = SegmentHeader(
            segment_id=secrets.randbits(62) | 1, created_unix_s=self._now(), writer=self._writer
        )
        path = self._path = self._folder / segment_name(segment.segment_id)
        fd = self._disk.create(path)
        try:
            with self._pool.lend(PAGE) as page:
                page[:] = pack_segment(segment, self._keys.key_id)
                self._disk.write(fd, page, 0)
        except BaseException:
            os.close(fd)
            self._disk.unlink(path)
            raise
        self._fd, self.segment, self.size = fd, segment, PAGE
        return segment

    def append(self, record: BlockRecord, payload: memoryview) -> tuple[Place, RecordHeader]:
        """Write a record; its payload is compared with its checksum on the copy that is written.

        Raises `Miss` (corrupt) if they differ, OSError if it cannot be written; then the segment
        is given up, cut to what it held before.
        """
        assert self.segment is not None
        segment_id, offset = self.segment.segment_id, self.size
        if self._packer.is_plain:
            place, header = self._append_plain(record, payload, segment_id, offset)
        else:
            place, header = self._append_packed(record, payload, segment_id, offset)
        self.size = place.end
        return place, header

    def _append_plain(
        self, record: BlockRecord, payload: memoryview, segment_id: int, offset: int
    ) -> tuple[Place, RecordHeader]:
        header, _ = self._packer.pack(record, payload, segment_id, offset)
        with self._pool.lend(header.span) as span:
            body = span[PAGE : PAGE + header.stored]
            body[:] = payload
            if xxhash.xxh3_128_digest(body) != record.checksum:
                raise Miss("corrupt", "the payload does not fit its checksum")
            self._write(span, header, segment_id, offset)
        return Place(segment_id=segment_id, offset=offset, span=header.span), header

    def _append_packed(
        self, record: BlockRecord, payload: memoryview, segment_id: int, offset: int
    ) -> tuple[Place, RecordHeader]:
        copy = memoryview(bytes(payload))
        if xxhash.xxh3_128_digest(copy) != record.checksum:
            raise Miss("corrupt", "the payload does not fit its checksum")
        header, data = self._packer.pack(record, copy, segment_id, offset)
        with self._pool.lend(header.span) as span:
            span[PAGE : PAGE + header.stored] = data
            self._write(span, header, segment_id, offset)
        return Place(segment_id=segment_id, offset=offset, span=header.span), header

    def _write(self, span: memoryview, header: RecordHeader, segment_id: int, offset: int) -> None:
        keys = self._keys.of_segment(segment_id)
        page = seal_page(keys, segment_id, offset, pack_record(header))
        span[:PAGE] = page.ljust(PAGE, b"\0")
        end = PAGE + header.stored
        span[end:] = bytes(header.span - end)
        try:
            self._disk.write(self._fd, span, offset)
        except OSError:
            self._give_up(offset)
            raise

    def _give_up(self, size: int) -> None:
        fd, self._fd, self.segment = self._fd, -1, None
        try:
            self._disk.truncate(fd, size)
        except OSError:
            pass  # what stands there is no whole record; the next scan cuts it off
        finally:
            os.close(fd)

    def sync(self) -> None:
        """Wait until all that was appended is on the device. Raises OSError."""
        if self.segment is not None:
            self._disk.sync(self._fd)

    def finish(self) -> None:
        """Sync and close the active segment. Raises OSError."""
        if self.segment is None:
            return
        fd, self._fd, self.segment = self._fd, -1, None
        try:
            self._disk.sync(fd)
        finally:
            os.close(fd)

    def finish_quietly(self) -> None:
        """The same where nothing more can be done about a failure."""
        with contextlib.suppress(OSError):
            self.finish()
