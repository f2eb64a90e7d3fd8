"""Stored responses: each row holds its whole context."""

import sqlite3
from collections.abc import Sequence

from finback.services.gateway.store_database import Database
from finback.services.gateway.store_limits import Item, StoreLimits, unpack, unpack_items
from finback.services.gateway.store_rows import (
    COLUMNS,
    Kept,
    Stored,
    index_items,
    insert,
    join_conversation,
    stored_of,
)
from finback.shared.clock import unix_s


class ResponseStore:
    """The table of responses."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits

    async def keep(self, kept: Kept) -> None:
        """Write a finished response, and what its conversation gains, at once."""

        def work(connection: sqlite3.Connection) -> None:
            if kept.is_stored:
                insert(connection, kept, self._limits)
                index_items(connection, kept)
            join_conversation(connection, kept, self._limits)

        await self._database.run(work)

    async def get(
        self, tenant: str, response_id: str, *, with_items: bool = False
    ) -> Stored | None:
        """A tenant's response; another's is not there."""
        columns = f"{COLUMNS}, items" if with_items else COLUMNS

        def work(connection: sqlite3.Connection) -> Stored | None:
            query = f"SELECT {columns} FROM responses WHERE id = ? AND tenant = ?"
            row = connection.execute(query, (response_id, tenant)).fetchone()
            return None if row is None or _is_expired(connection, response_id) else stored_of(row)

        return await self._database.read(work)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete it, its events and its lease; who makes it is fenced off."""

        def work(connection: sqlite3.Connection) -> bool:
            query = "DELETE FROM responses WHERE id = ? AND tenant = ?"
            return connection.execute(query, (response_id, tenant)).rowcount > 0

        return await self._database.run(work)

    async def find_items(self, tenant: str, item_ids: Sequence[str]) -> dict[str, Item]:
        """The items of those ids among a tenant's responses and conversations."""

        def work(connection: sqlite3.Connection) -> dict[str, Item]:
            found: dict[str, Item] = {}
            for item_id in item_ids:
                item = _find_item(connection, tenant, item_id)
                if item is not None:
                    found[item_id] = item
            return found

        return await self._database.read(work)


def _is_expired(connection: sqlite3.Connection, response_id: str) -> bool:
    """What waits for the sweep is gone already."""
    query = "SELECT 1 FROM responses WHERE id = ? AND expires_s < ?"
    return connection.execute(query, (response_id, unix_s())).fetchone() is not None


def _find_item(connection: sqlite3.Connection, tenant: str, item_id: str) -> Item | None:
    row = connection.execute(
        """SELECT packed FROM conversation_items JOIN conversations ON id = conversation_id
            WHERE item_id = ? AND tenant = ? LIMIT 1""",
        (item_id, tenant),
    ).fetchone()
    if row is not None:
        found: Item = unpack(row[0])
        return found
    row = connection.execute(
        """SELECT body, items FROM item_index JOIN responses ON id = response_id
            WHERE item_id = ? AND tenant = ? LIMIT 1""",
        (item_id, tenant),
    ).fetchone()
    if row is None:
        return None
    candidates: list[Item] = [*unpack(row[0])["output"], *unpack_items(row[1])]
    return next((item for item in candidates if item["id"] == item_id), None)
