"""The event log of background streams, so that any gateway can play and follow them."""

import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from finback.services.gateway.store_database import Database
from finback.shared.errors import Cancelled, PayloadTooLarge

# Of one response: about a hundred thousand deltas.
MAX_LOG_BYTES: Final = 32 * 2**20
_ROWS_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Documents with their sequence numbers, and how the response stands.

    `has_log`: it was created as a stream, and its events are still kept.
    """

    documents: tuple[tuple[int, bytes], ...]
    status: str
    epoch: int
    has_log: bool = True


class EventLog:
    """Rows of documents, numbered through."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(
        self, response_id: str, epoch: int, first_seq: int, documents: Sequence[bytes]
    ) -> bool:
        """Add documents; False: the epoch is over, nothing was written."""
        packed = zlib.compress(b"\n".join(documents), 1)

        def work(connection: sqlite3.Connection) -> bool:
            if not _is_current(connection, response_id, epoch):
                return False
            _check_log(connection, response_id, len(packed))
            connection.execute(
                "INSERT INTO events VALUES (?, ?, ?, ?)",
                (response_id, first_seq, first_seq + len(documents) - 1, packed),
            )
            return True

        return await self._database.run(work)

    async def begin(self, response_id: str, epoch: int, *, keeps: int) -> int:
        """The number of an attempt's first event. Raises `Cancelled` if its epoch is over.

        What a lost attempt told is forgotten, unless there are just the `keeps` events of a start.
        """

        def work(connection: sqlite3.Connection) -> int:
            if not _is_current(connection, response_id, epoch):
                raise Cancelled("another gateway makes this response, or it was cancelled")
            row = connection.execute(
                "SELECT coalesce(max(last_seq), -1) FROM events WHERE response_id = ?",
                (response_id,),
            ).fetchone()
            number = int(row[0]) + 1
            if number != keeps:
                _forget(connection, response_id, number)
            return number

        return await self._database.run(work)

    async def page(self, tenant: str, response_id: str, after: int) -> LogPage | None:
        """The next documents after number `after`; None: there is no such response."""

        def work(connection: sqlite3.Connection) -> LogPage | None:
            query = "SELECT status, epoch FROM responses WHERE id = ? AND tenant = ?"
            found = connection.execute(query, (response_id, tenant)).fetchone()
            if found is None:
                return None
            rows = connection.execute(
                """SELECT first_seq, packed FROM events WHERE response_id = ? AND last_seq > ?
                    ORDER BY first_seq LIMIT ?""",
                (response_id, after, _ROWS_AT_ONCE),
            ).fetchall()
            documents = tuple(
                (first_seq + at, document)
                for first_seq, packed in rows
                for at, document in enumerate(zlib.decompress(packed).split(b"\n"))
                if first_seq + at > after and document
            )
            query = "SELECT EXISTS (SELECT 1 FROM events WHERE response_id = ?)"
            has_log = bool(rows) or bool(connection.execute(query, (response_id,)).fetchone()[0])
            return LogPage(documents=documents, status=found[0], epoch=found[1], has_log=has_log)

        return await self._database.read(work)


def _forget(connection: sqlite3.Connection, response_id: str, number: int) -> None:
    """Drop all events before `number`; an empty one in their place keeps the numbers rising."""
    connection.execute("DELETE FROM events WHERE response_id = ?", (response_id,))
    if number:
        last = number - 1
        row = (response_id, last, last, zlib.compress(b""))
        connection.execute("INSERT INTO events VALUES (?, ?, ?, ?)", row)


def _is_current(connection: sqlite3.Connection, response_id: str, epoch: int) -> bool:
    query = "SELECT 1 FROM responses WHERE id = ? AND epoch = ?"
    return connection.execute(query, (response_id, epoch)).fetchone() is not None


def _check_log(connection: sqlite3.Connection, response_id: str, num_bytes: int) -> None:
    query = "SELECT coalesce(sum(length(packed)), 0) FROM events WHERE response_id = ?"
    (held,) = connection.execute(query, (response_id,)).fetchone()
    if held + num_bytes > MAX_LOG_BYTES:
        raise PayloadTooLarge(
            f"the events of a background stream may have {MAX_LOG_BYTES} bytes at most"
        )
