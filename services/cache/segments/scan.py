"""Reading a segment from end to end: its live and dead records, past damaged pages.

Only header pages are read, and whatever follows a damaged one until the next good one is found.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from finback.services.cache.segments.buffers import BufferPool
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.format import (
    PAGE,
    DeadHeader,
    RecordHeader,
    SegmentHeader,
    parse_page,
    parse_segment,
)
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.record import Place

_WINDOW: Final = 64 * 1024
_LARGE_WINDOW: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A record's header and where it stands."""

    place: Place
    header: RecordHeader | DeadHeader


class Pages:
    """Header pages of one open file, through a window that follows the records' sizes."""

    def __init__(self, disk: Disk, fd: int, buffer: memoryview) -> None:
        self._disk = disk
        self._fd = fd
        self._buffer = buffer
        self._start = 0
        self._length = 0
        self.window = PAGE

    def at(self, offset: int) -> bytes:
        """The page at `offset`; shorter at the end of the file. Raises OSError."""
        if not self._start <= offset <= self._start + self._length - PAGE:
            self._length = self._disk.read(self._fd, [self._buffer[: self.window]], offset)
            self._start = offset
        at = offset - self._start
        return bytes(self._buffer[at : min(at + PAGE, self._length)])


def read_header(disk: Disk, pool: BufferPool, fd: int, key_id: bytes) -> SegmentHeader:
    """Page 0. Raises OSError and `ForeignSegment`."""
    with pool.lend(PAGE) as page:
        length = disk.read(fd, [page], 0)
        return parse_segment(bytes(page[:length]), key_id)


def scan(
    disk: Disk, pool: BufferPool, fd: int, keys: KeyRing, segment_id: int, start: int
) -> Iterator[Found]:
    """Records from offset `start` on whose span lies within the file. Raises OSError."""
    size = os.fstat(fd).st_size
    of_segment = keys.of_segment(segment_id)
    with pool.lend(_LARGE_WINDOW) as buffer:
        pages = Pages(disk, fd, buffer)
        offset = start
        while offset + PAGE <= size:
            header = parse_page(pages.at(offset), of_segment, segment_id, offset)
            if header is None or not _fits(header, offset, size):
                pages.window = _LARGE_WINDOW
                offset += PAGE
                continue
            place = Place(segment_id=segment_id, offset=offset, span=header.span)
            pages.window = _WINDOW if header.span < _WINDOW else PAGE
            yield Found(place=place, header=header)
            offset = place.end


def _fits(header: RecordHeader | DeadHeader, offset: int, size: int) -> bool:
    return header.span >= PAGE and header.span % PAGE == 0 and offset + header.span <= size
