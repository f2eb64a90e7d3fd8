"""Background responses in the store: who makes them, under which epoch, and how they end.

A writer of an unfinished response names the epoch it claimed; once another has claimed, cancelled
or deleted it, the writer changes nothing and is told so.
"""

import sqlite3
from typing import Any

from finback.services.gateway.store_database import Database
from finback.services.gateway.store_limits import StoreLimits, pack, unpack
from finback.services.gateway.store_rows import (
    COLUMNS,
    UNFINISHED,
    Kept,
    Stored,
    index_items,
    insert,
    join_conversation,
    stored_of,
)
from finback.shared.clock import unix_s


class LeaseStore:
    """The unfinished rows of the table of responses."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits

    async def queue(self, kept: Kept, plan: dict[str, Any], owner: str) -> None:
        """Write a background response that is to be made."""
        limits = self._limits
        await self._database.run(lambda c: insert(c, kept, limits, plan=plan, owner=owner))

    async def unfinished(self) -> list[tuple[str, str, int]]:
        """(response, owner, epoch) of all that are to be made or being made."""

        def work(connection: sqlite3.Connection) -> list[tuple[str, str, int]]:
            query = "SELECT id, owner, epoch FROM responses WHERE status IN (?, ?)"
            return connection.execute(query, UNFINISHED).fetchall()

        return await self._database.read(work)

    async def claim(self, response_id: str, epoch: int, owner: str) -> Stored | None:
        """Become the one who makes it, if nobody has since `epoch`; the new epoch is in it."""

        def work(connection: sqlite3.Connection) -> Stored | None:
            query = f"SELECT {COLUMNS}, items, plan FROM responses WHERE id = ? AND epoch = ?"
            row = connection.execute(query, (response_id, epoch)).fetchone()
            if row is None or row[3] not in UNFINISHED:
                return None
            body = {**unpack(row[8]), "status": "in_progress"}
            connection.execute(
                """UPDATE responses SET owner = ?, epoch = epoch + 1, status = 'in_progress',
                    num_attempts = num_attempts + 1, body = ? WHERE id = ?""",
                (owner, pack(body), response_id),
            )
            again = connection.execute(query, (response_id, epoch + 1)).fetchone()
            return stored_of(again)

        return await self._database.run(work)

    async def release(self, response_id: str, epoch: int) -> None:
        """Give it back unmade: anybody may claim it, and the attempt does not count."""

        def work(connection: sqlite3.Connection) -> None:
            connection.execute(
                """UPDATE responses SET owner = '', num_attempts = num_attempts - 1
                    WHERE id = ? AND epoch = ?""",
                (response_id, epoch),
            )

        await self._database.run(work)

    async def finish(self, kept: Kept, epoch: int) -> bool:
        """Write the end of a background response; False: somebody else's word counts."""

        def work(connection: sqlite3.Connection) -> bool:
            body = pack(kept.body)
            ended = connection.execute(
                """UPDATE responses SET status = ?, body = ?, plan = NULL, owner = '',
                    epoch = epoch + 1, bytes = length(items) + ?, expires_s = ?
                    WHERE id = ? AND epoch = ? AND status = 'in_progress'""",
                (
                    kept.body["status"],
                    body,
                    len(body),
                    unix_s() + self._limits.retention_s,
                    kept.response_id,
                    epoch,
                ),
            )
            if not ended.rowcount:
                return False
            index_items(connection, kept)
            join_conversation(connection, kept, self._limits)
            return True

        return await self._database.run(work)

    async def cancel(self, tenant: str, response_id: str) -> Stored | None:
        """Cancel it if it is not finished; returns what it is now."""

        def work(connection: sqlite3.Connection) -> Stored | None:
            query = f"SELECT {COLUMNS} FROM responses WHERE id = ? AND tenant = ?"
            row = connection.execute(query, (response_id, tenant)).fetchone()
            if row is None or row[3] not in UNFINISHED:
                return None if row is None else stored_of(row)
            body = {**unpack(row[8]), "status": "cancelled"}
            connection.execute(
                """UPDATE responses SET status = 'cancelled', body = ?, plan = NULL, owner = '',
                    epoch = epoch + 1 WHERE id = ?""",
                (pack(body), response_id),
            )
            return stored_of(connection.execute(query, (response_id, tenant)).fetchone())

        return await self._database.run(work)
