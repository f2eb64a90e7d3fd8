"""Verifying: every record read again and compared; the index compared with the segments."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from finback.services.cache.segments.format import PAGE
from finback.services.cache.segments.record import Entry, Miss
from finback.services.cache.segments.state import State
from finback.shared.errors import InvariantViolated

_PAGE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a scrub is; `num_bad` blocks were damaged, and let go."""

    num_checked: int
    num_bad: int
    num_blocks: int
    num_bytes: int


def verify(state: State) -> Iterator[Progress]:
    """Read and compare all own records; yields after every page of 256. Damaged ones are let go.

    The caller sets the pace by how fast it asks on.
    """
    num_checked = num_bad = num_bytes = last = 0
    while True:
        entries = state.run(lambda: state.index.after(last, _PAGE_ROWS))  # noqa: B023  # runs at once
        if not entries:
            return
        last = entries[-1].row_id
        for entry in entries:
            if not entry.is_own:
                continue
            num_bad += not _is_good(state, entry)
            num_checked += 1
            num_bytes += entry.place.span
        total = state.index.usage.total().num_blocks
        yield Progress(
            num_checked=num_checked, num_bad=num_bad, num_blocks=total, num_bytes=num_bytes
        )


def _is_good(state: State, entry: Entry) -> bool:
    with state.pool.lend(entry.record.length) as out:
        try:
            state.reader.read_one(entry, out)
            return True
        except Miss as miss:
            found = miss
    with state.writing:
        now = state.run(lambda: state.index.get(entry.record.salt, entry.record.hash))
        if now is None or now.place != entry.place:
            return True  # erased or moved meanwhile
        state.log.warning("a block of the file tier is damaged", why=str(found))
        if found.reason != "io":
            state.erase([entry], found.reason)
    return False


def check_integrity(state: State) -> None:
    """Raise `InvariantViolated` unless rows lie apart, within their files, and are counted right."""
    with state.writing, state.lock:
        segments = {
            segment.segment_id: segment for segment in state.table.all(state.index.live_bytes)
        }
        num_blocks = num_bytes = 0
        for segment in segments.values():
            end, live_bytes = PAGE, 0
            for entry in state.index.of_segment(segment.segment_id):
                if entry.place.offset < end:
                    raise InvariantViolated(f"records overlap in segment {segment.path}")
                end = entry.place.end
                live_bytes += entry.place.span
                num_blocks += entry.is_own
                num_bytes += entry.place.span if entry.is_own else 0
            if live_bytes != segment.live_bytes:
                raise InvariantViolated(f"the live bytes of segment {segment.path} are miscounted")
            if end > max(PAGE, segment.size):
                raise InvariantViolated(f"a record ends behind segment {segment.path}")
            _check_file(state, segment.segment_id, segment.size)
        usage = state.index.usage.total()
        if (num_blocks, num_bytes) != (usage.num_blocks, usage.num_bytes):
            raise InvariantViolated(
                f"{num_blocks} blocks of {num_bytes} bytes are in segments,"
                f" {usage.num_blocks} of {usage.num_bytes} are counted"
            )


def _check_file(state: State, segment_id: int, size: int) -> None:
    try:
        found = os.stat(state.path_of(segment_id)).st_size
    except OSError:
        return  # removed by somebody else: each read will be a miss
    if found < size:
        # Cut by somebody else: as above.
        state.log.warning("a segment is shorter than the index knows", segment=f"{segment_id:016x}")
