"""The index of blocks: which record lies where, by (salt, hash), by age, by owner."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from finback.services.cache.segments.database import Database, IndexDamaged
from finback.services.cache.segments.record import BlockRecord, Entry, Place
from finback.services.cache.segments.usage import Share, UsageBook

_COLUMNS: Final = (
    "b.id, b.salt, b.hash, b.tenant, b.class, b.segment, b.offset, b.span, b.length, b.checksum,"
    " b.is_packed, b.is_own, b.expires, b.created, b.used, b.first_block"
)
_UNPINNED: Final = "NOT EXISTS (SELECT 1 FROM pinned p WHERE p.salt = b.salt AND p.hash = b.hash)"
_CHUNK: Final = 512


class Index:
    """Rows over a `Database`. Not thread-safe; every method may raise `IndexDamaged`."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.usage = UsageBook()
        # Bytes of records that are here, by segment; all writers'.
        self.live_bytes: Counter[int] = Counter(
            dict(database.run("SELECT segment, sum(span) FROM blocks GROUP BY segment"))
        )
        rows = database.run("SELECT id, text FROM names")
        self._ids: dict[str, int] = {text: number for number, text in rows}
        self._texts: dict[int, str] = dict(rows)
        for salt, tenant, traffic_class, count, size in database.run(
            "SELECT salt, tenant, class, count(*), sum(span) FROM blocks WHERE is_own"
            " GROUP BY salt, tenant, class"
        ):
            share = Share(self._text(salt), self._text(tenant), self._text(traffic_class))
            self.usage.add(share, size, count)

    def add(self, record: BlockRecord, place: Place, *, is_packed: bool, is_own: bool) -> None:
        """Take in a block that is not there yet."""
        self.database.change(
            "INSERT INTO blocks (salt, hash, tenant, class, segment, offset, span, length,"
            " checksum, is_packed, is_own, expires, created, used, first_block)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._id(record.salt), record.hash, self._id(record.tenant),
                self._id(record.traffic_class), place.segment_id, place.offset, place.span,
                record.length, record.checksum, is_packed, is_own, record.expires_unix_s,
                record.created_unix_s, record.used_unix_s, record.first_block,
            ),
        )  # fmt: skip
        self.live_bytes[place.segment_id] += place.span
        if is_own:
            self.usage.add(_share(record), place.span)

    def get(self, salt: str, hash_: bytes) -> Entry | None:
        """The row of a block."""
        rows = self._select("b.salt = ? AND b.hash = ?", (self._ids.get(salt), hash_))
        return rows[0] if rows else None

    def get_many(self, salt: str, hashes: Sequence[bytes]) -> dict[bytes, Entry]:
        """The rows of those blocks that are there, by hash."""
        number = self._ids.get(salt)
        found: dict[bytes, Entry] = {}
        for part in _parts(hashes):
            where = f"b.salt = ? AND b.hash IN ({_marks(part)})"
            for entry in self._select(where, (number, *part)):
                found[entry.record.hash] = entry
        return found

    def expiries(self, salt: str, hashes: Sequence[bytes]) -> dict[bytes, float]:
        """When those blocks that are there expire (0: never), by hash."""
        number = self._ids.get(salt)
        found: dict[bytes, float] = {}
        for part in _parts(hashes):
            found.update(
                self.database.run(
                    f"SELECT hash, expires FROM blocks WHERE salt = ? AND hash IN ({_marks(part)})",
                    (number, *part),
                )
            )
        return found

    def remove(self, entry: Entry) -> bool:
        """Take out this very row; False if it is gone or was moved since."""
        place = entry.place
        gone = self.database.change(
            "DELETE FROM blocks WHERE id = ? AND segment = ? AND offset = ?",
            (entry.row_id, place.segment_id, place.offset),
        )
        if gone:
            self.live_bytes[place.segment_id] -= place.span
        if gone and entry.is_own:
            self.usage.remove(_share(entry.record), place.span)
        return gone > 0

    def move(self, entry: Entry, place: Place, *, is_packed: bool) -> bool:
        """Point this row to a copy of its record; False if it is gone."""
        moved = self.database.change(
            "UPDATE blocks SET segment = ?, offset = ?, span = ?, is_packed = ?"
            " WHERE id = ? AND segment = ? AND offset = ?",
            (place.segment_id, place.offset, place.span, is_packed,
             entry.row_id, entry.place.segment_id, entry.place.offset),
        )  # fmt: skip
        if moved:
            self.live_bytes[entry.place.segment_id] -= entry.place.span
            self.live_bytes[place.segment_id] += place.span
            self.usage.remove(_share(entry.record), entry.place.span)
            self.usage.add(_share(entry.record), place.span)
        return moved > 0

    def touch(self, used: Iterable[tuple[int, float]]) -> None:
        """Note when rows (by id) were last used; their time begins anew then."""
        for row_id, when in used:
            # What is left at a use is all of its time: the end moves along with the last use.
            self.database.change(
                "UPDATE blocks SET used = MAX(used, ?), expires = CASE"
                " WHEN expires > 0 AND used > 0 AND ? > used THEN expires + (? - used)"
                " ELSE expires END WHERE id = ?",
                (when, when, when, row_id),
            )

    def prolong(self, entry: Entry, expires_unix_s: float, used_unix_s: float) -> None:
        """Let a block, used then, live until then."""
        self.database.change(
            "UPDATE blocks SET expires = ?, used = MAX(used, ?) WHERE id = ?",
            (expires_unix_s, used_unix_s, entry.row_id),
        )

    # --- selections

    def of_segment(self, segment_id: int, start: int = 0, limit: int = -1) -> list[Entry]:
        """Records of a segment from an offset on, by offset."""
        where = "b.segment = ? AND b.offset >= ? ORDER BY b.offset LIMIT ?"
        return self._select(where, (segment_id, start, limit))

    def oldest(self, traffic_class: str, limit: int) -> list[Entry]:
        """Own, unpinned blocks of a class, the longest unused first."""
        where = f"b.is_own AND b.class = ? AND {_UNPINNED} ORDER BY b.used, b.id LIMIT ?"
        return self._select(where, (self._ids.get(traffic_class), limit))

    def oldest_of_tenant(self, tenant: str, limit: int) -> list[Entry]:
        """Own, unpinned blocks of a tenant, the longest unused first."""
        where = f"b.is_own AND b.tenant = ? AND {_UNPINNED} ORDER BY b.used, b.id LIMIT ?"
        return self._select(where, (self._ids.get(tenant), limit))

    def expired(self, now_unix_s: float, limit: int) -> list[Entry]:
        """Own, unpinned blocks whose time is over, those that ended first at the front."""
        where = (
            f"b.expires > 0 AND b.expires <= ? AND b.is_own AND {_UNPINNED}"
            " ORDER BY b.expires LIMIT ?"
        )
        return self._select(where, (now_unix_s, limit))

    def matching(
        self, *, tenant: str | None, salt: str | None, hashes: Sequence[bytes] | None, limit: int
    ) -> list[Entry]:
        """Blocks that fit all that is given, up to `limit` (with hashes: a little above)."""
        terms, values = ["1"], []
        for column, text in (("tenant", tenant), ("salt", salt)):
            if text is not None:
                terms.append(f"b.{column} = ?")
                values.append(self._ids.get(text))
        where = " AND ".join(terms)
        if hashes is None:
            return self._select(f"{where} LIMIT ?", [*values, limit])
        found: list[Entry] = []
        for part in _parts(hashes):
            if len(found) >= limit:
                break
            found += self._select(f"{where} AND b.hash IN ({_marks(part)})", [*values, *part])
        return found

    def after(self, row_id: int, limit: int = 1000) -> list[Entry]:
        """Blocks in the order of their rows, behind one; the first page is behind 0."""
        return self._select("b.id > ? ORDER BY b.id LIMIT ?", (row_id, limit))

    # --- pins

    def set_pins(self, pins: dict[str, tuple[str, tuple[bytes, ...]]]) -> None:
        """Forget all pins, and take these: name -> (salt, hashes)."""
        self.database.change("DELETE FROM pinned")
        for name, (salt, hashes) in pins.items():
            for hash_ in hashes:
                values = (self._id(salt), hash_, name)
                self.database.change("INSERT OR IGNORE INTO pinned VALUES (?, ?, ?)", values)

    def is_pinned(self, salt: str, hash_: bytes) -> bool:
        """Whether some pin holds this block."""
        values = (self._ids.get(salt), hash_)
        return bool(
            self.database.run("SELECT 1 FROM pinned WHERE salt = ? AND hash = ? LIMIT 1", values)
        )

    # --- inside

    def _select(self, where: str, values: Sequence[Any]) -> list[Entry]:
        rows = self.database.run(f"SELECT {_COLUMNS} FROM blocks b WHERE {where}", values)
        return [self._entry(row) for row in rows]

    def _entry(self, row: tuple[Any, ...]) -> Entry:
        (
            row_id, salt, hash_, tenant, traffic_class, segment, offset, span, length, checksum,
            is_packed, is_own, expires, created, used, first_block,
        ) = row  # fmt: skip
        try:
            # Of integers negative if one of them is; a TypeError for all else.
            is_damaged = (segment | offset | span | length | first_block) < 0
        except TypeError:
            is_damaged = True
        if is_damaged:
            raise IndexDamaged("a row holds what was never written")
        record = BlockRecord(
            salt=self._text(salt),
            hash=hash_,
            length=length,
            checksum=checksum,
            expires_unix_s=expires,
            tenant=self._text(tenant),
            traffic_class=self._text(traffic_class),
            created_unix_s=created,
            used_unix_s=used,
            first_block=first_block,
        )
        return Entry(
            row_id=row_id,
            record=record,
            place=Place(segment_id=segment, offset=offset, span=span),
            is_packed=bool(is_packed),
            is_own=bool(is_own),
        )

    def _text(self, number: int) -> str:
        return self._texts.get(number, "")

    def _id(self, text: str) -> int:
        number = self._ids.get(text)
        if number is None:
            self.database.change("INSERT INTO names (text) VALUES (?)", (text,))
            [(number,)] = self.database.run("SELECT id FROM names WHERE text = ?", (text,))
            self._ids[text], self._texts[number] = number, text
        return number


def _parts(hashes: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Bounded parts, padded to few lengths by repetition: SQLite compiles each length anew."""
    for start in range(0, len(hashes), _CHUNK):
        part = list(hashes[start : start + _CHUNK])
        size = 1 << (len(part) - 1).bit_length()
        yield part + part[-1:] * (size - len(part))


def _marks(part: Sequence[bytes]) -> str:
    return ",".join("?" * len(part))


def _share(record: BlockRecord) -> Share:
    return Share(record.salt, record.tenant, record.traffic_class)
