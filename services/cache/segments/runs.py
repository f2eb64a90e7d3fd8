"""Which records are read with one call: neighbours in a segment, up to a size. Pure."""

from collections.abc import Sequence
from typing import Final

from finback.services.cache.segments.record import Entry

RUN_BYTES: Final = 8 * 1024 * 1024


def runs(
    entries: Sequence[tuple[int, Entry]], most_bytes: int = RUN_BYTES
) -> list[list[tuple[int, Entry]]]:
    """Groups of (number, entry) whose records follow each other without a gap.

    A record larger than `most_bytes` is a group of its own; packed records stand alone as well.
    """
    ordered = sorted(entries, key=lambda pair: (pair[1].place.segment_id, pair[1].place.offset))
    groups: list[list[tuple[int, Entry]]] = []
    size = 0
    for number, entry in ordered:
        place = entry.place
        last = groups[-1][-1][1] if groups else None
        joins = (
            last is not None
            and last.place.segment_id == place.segment_id
            and last.place.end == place.offset
            and size + place.span <= most_bytes
            and not (last.is_packed or entry.is_packed)
        )
        if joins:
            groups[-1].append((number, entry))
            size += place.span
        else:
            groups.append([(number, entry)])
            size = place.span
    return groups
