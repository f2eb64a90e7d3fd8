"""Taking records out of segments: their header page is overwritten, their payload made a hole.

Whatever leaves the index is erased in its file as well, before the index says so. A segment that is
scanned after the index was lost therefore holds nothing that was forgotten.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from finback.services.cache.segments.buffers import BufferPool
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.format import PAGE, DeadHeader, pack_dead
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.record import Place

_ZEROS: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """What was done; `hole_bytes` of it gave their room back."""

    place: Place
    hole_bytes: int


class Eraser:
    """Writes into own segments only."""

    def __init__(
        self, disk: Disk, pool: BufferPool, keys: KeyRing, path_of: Callable[[int], Path]
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._keys = keys
        self._path_of = path_of

    def erase(self, places: Iterable[Place], *, is_final: bool) -> list[Erased]:
        """Mark records dead. `is_final`: wipe their bytes, too, and wait until that is on the disk.

        A segment whose file is gone counts as erased. Raises OSError.
        """
        done: list[Erased] = []
        ordered = sorted(places, key=lambda place: (place.segment_id, place.offset))
        for segment_id, group in groupby(ordered, key=lambda place: place.segment_id):
            try:
                fd = self._disk.open(self._path_of(segment_id), is_writer=True)
            except FileNotFoundError:
                done += [Erased(place=place, hole_bytes=0) for place in group]
                continue
            try:
                done += [self._erase(fd, place, is_final) for place in group]
                if is_final:
                    self._disk.sync(fd)
            finally:
                os.close(fd)
        return done

    def _erase(self, fd: int, place: Place, is_final: bool) -> Erased:
        payload = place.span - PAGE
        # First the mark: once the payload is gone nobody may take this for a record.
        self._mark(fd, place, is_hole=False)
        is_hole = self._disk.punch(fd, place.offset + PAGE, payload)
        if is_hole:
            self._mark(fd, place, is_hole=True)
        elif is_final:
            self._wipe(fd, place.offset + PAGE, payload)
        return Erased(place=place, hole_bytes=payload if is_hole else 0)

    def _mark(self, fd: int, place: Place, *, is_hole: bool) -> None:
        keys = self._keys.of_segment(place.segment_id)
        header = DeadHeader(span=place.span, is_hole=is_hole)
        with self._pool.lend(PAGE) as page:
            page[:] = pack_dead(keys, place.segment_id, place.offset, header)
            self._disk.write(fd, page, place.offset)

    def _wipe(self, fd: int, offset: int, length: int) -> None:
        with self._pool.lend(min(length, _ZEROS) or PAGE) as zeros:
            zeros[:] = bytes(zeros.nbytes)
            for start in range(0, length, _ZEROS):
                part = zeros[: min(_ZEROS, length - start)]
                self._disk.write(fd, part, offset + start)
