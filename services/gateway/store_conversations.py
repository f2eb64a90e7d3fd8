"""Stored conversations: items in order, each a row of its own."""

import json
import sqlite3
from collections.abc import Sequence

from finback.services.gateway.store_append import (
    StoredConversation,
    append_items,
    count_bytes,
    require,
)
from finback.services.gateway.store_database import Database
from finback.services.gateway.store_limits import Item, StoreLimits, make_room, unpack
from finback.shared.clock import unix_s
from finback.shared.errors import NotFound


class ConversationStore:
    """The tables of conversations. What is not there, or not the tenant's: `NotFound`."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits

    async def create(
        self, tenant: str, conversation_id: str, metadata: dict[str, str], items: Sequence[Item]
    ) -> StoredConversation:
        """A new conversation."""

        def work(connection: sqlite3.Connection) -> StoredConversation:
            make_room(connection, self._limits, tenant, 0)
            now_s = unix_s()
            connection.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, 0, 0, ?)",
                (
                    conversation_id,
                    tenant,
                    now_s,
                    now_s + self._limits.retention_s,
                    json.dumps(metadata),
                ),
            )
            append_items(connection, self._limits, tenant, conversation_id, items)
            return require(connection, tenant, conversation_id)

        return await self._database.run(work)

    async def get(self, tenant: str, conversation_id: str) -> StoredConversation:
        """One conversation."""
        return await self._database.read(lambda c: require(c, tenant, conversation_id))

    async def update(
        self, tenant: str, conversation_id: str, metadata: dict[str, str]
    ) -> StoredConversation:
        """Replace its metadata."""

        def work(connection: sqlite3.Connection) -> StoredConversation:
            require(connection, tenant, conversation_id)
            connection.execute(
                "UPDATE conversations SET metadata = ?, expires_s = ? WHERE id = ?",
                (json.dumps(metadata), unix_s() + self._limits.retention_s, conversation_id),
            )
            return require(connection, tenant, conversation_id)

        return await self._database.run(work)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete it with its items."""

        def work(connection: sqlite3.Connection) -> None:
            require(connection, tenant, conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

        await self._database.run(work)

    async def append(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
        """Add items at its end, all or none."""
        limits = self._limits
        await self._database.run(lambda c: append_items(c, limits, tenant, conversation_id, items))

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """All items in order."""

        def work(connection: sqlite3.Connection) -> list[Item]:
            require(connection, tenant, conversation_id)
            rows = connection.execute(
                "SELECT packed FROM conversation_items WHERE conversation_id = ? ORDER BY position",
                (conversation_id,),
            )
            return [unpack(packed) for (packed,) in rows]

        return await self._database.read(work)

    async def page(
        self, tenant: str, conversation_id: str, *, after: str | None, limit: int, is_desc: bool
    ) -> list[Item]:
        """Up to `limit` items behind the one called `after`."""

        def work(connection: sqlite3.Connection) -> list[Item]:
            require(connection, tenant, conversation_id)
            position = -1 if not is_desc else 2**62
            if after is not None:
                position = _position(connection, conversation_id, after)
            sign, order = ("<", "DESC") if is_desc else (">", "ASC")
            rows = connection.execute(
                f"""SELECT packed FROM conversation_items WHERE conversation_id = ?
                    AND position {sign} ? ORDER BY position {order} LIMIT ?""",
                (conversation_id, position, limit),
            )
            return [unpack(packed) for (packed,) in rows]

        return await self._database.read(work)

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> Item:
        """One item."""

        def work(connection: sqlite3.Connection) -> Item:
            require(connection, tenant, conversation_id)
            row = connection.execute(
                "SELECT packed FROM conversation_items WHERE conversation_id = ? AND item_id = ?",
                (conversation_id, item_id),
            ).fetchone()
            if row is None:
                raise _no_item(item_id)
            found: Item = unpack(row[0])
            return found

        return await self._database.read(work)

    async def delete_item(
        self, tenant: str, conversation_id: str, item_id: str
    ) -> StoredConversation:
        """Delete one item."""

        def work(connection: sqlite3.Connection) -> StoredConversation:
            require(connection, tenant, conversation_id)
            row = connection.execute(
                """DELETE FROM conversation_items WHERE conversation_id = ? AND item_id = ?
                    RETURNING raw_bytes, length(packed)""",
                (conversation_id, item_id),
            ).fetchone()
            if row is None:
                raise _no_item(item_id)
            count_bytes(connection, conversation_id, -row[0], -row[1])
            return require(connection, tenant, conversation_id)

        return await self._database.run(work)


def _position(connection: sqlite3.Connection, conversation_id: str, item_id: str) -> int:
    row = connection.execute(
        "SELECT position FROM conversation_items WHERE conversation_id = ? AND item_id = ?",
        (conversation_id, item_id),
    ).fetchone()
    if row is None:
        raise _no_item(item_id, param="after")
    return int(row[0])


def _no_item(item_id: str, param: str = "item_id") -> NotFound:
    return NotFound(f"Item with id '{item_id[:80]}' not found.", param=param)
