"""The index's list of segments: how far each was read, and how much of it is holes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from finback.services.cache.segments.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One known segment. `size`: bytes whose records are in the index; `path` below the folder."""

    segment_id: int
    path: str
    size: int
    holes: int = 0
    created_unix_s: float = 0.0
    is_own: bool = True
    live_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """What it takes on the disk."""
        return self.size - self.holes


class SegmentTable:
    """Rows over a `Database`. Not thread-safe; every method may raise `IndexDamaged`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, segment: Segment) -> None:
        """Add or replace."""
        self._database.change(
            "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?)",
            (segment.segment_id, segment.path, segment.size, segment.holes,
             segment.created_unix_s, segment.is_own),
        )  # fmt: skip

    def grow(self, segment_id: int, size: int) -> None:
        """Its records are in the index up to `size`."""
        self._database.change("UPDATE segments SET size = ? WHERE id = ?", (size, segment_id))

    def add_holes(self, segment_id: int, num_bytes: int) -> None:
        """So much of it gave its room back."""
        self._database.change(
            "UPDATE segments SET holes = holes + ? WHERE id = ?", (num_bytes, segment_id)
        )

    def remove(self, segment_id: int) -> None:
        """Forget it; its blocks are taken out by the caller."""
        self._database.change("DELETE FROM segments WHERE id = ?", (segment_id,))

    def get(self, segment_id: int) -> Segment | None:
        """One of them, without its live bytes."""
        rows = self._database.run(
            "SELECT id, path, size, holes, created, is_own, 0 FROM segments WHERE id = ?",
            (segment_id,),
        )
        return _segment(rows[0]) if rows else None

    def all(self, live_bytes: Mapping[int, int]) -> list[Segment]:
        """All of them with their live bytes (`Index.live_bytes`), by age."""
        rows = self._database.run(
            "SELECT id, path, size, holes, created, is_own FROM segments ORDER BY created, id"
        )
        return [_segment((*row, live_bytes.get(row[0], 0))) for row in rows]

    def taken_bytes(self) -> int:
        """What the own segments take on the disk."""
        return int(
            self._database.run("SELECT ifnull(sum(size - holes), 0) FROM segments WHERE is_own")[0][
                0
            ]
        )

    def get_meta(self, name: str) -> str | None:
        """A value that was kept, or None."""
        rows = self._database.run("SELECT value FROM meta WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def set_meta(self, name: str, value: str) -> None:
        """Keep a value."""
        self._database.change("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))


def _segment(row: Iterable[Any]) -> Segment:
    segment_id, path, size, holes, created, is_own, live = row
    return Segment(
        segment_id=segment_id,
        path=path,
        size=size,
        holes=holes,
        created_unix_s=created,
        is_own=bool(is_own),
        live_bytes=live,
    )
