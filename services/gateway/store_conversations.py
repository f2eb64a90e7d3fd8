"""Stored conversations: items in order, each a row of its own."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finback.services.gateway.store_database import Database
from finback.services.gateway.store_limits import (
    MAX_CONVERSATION_ITEMS,
    Item,
    StoreLimits,
    check_value,
    make_room,
    pack,
    raw_json,
    unpack,
)
from finback.shared.clock import unix_s
from finback.shared.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """A conversation without its items."""

    conversation_id: str
    created_s: float
    metadata: dict[str, str]


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
            return _require(connection, tenant, conversation_id)

        return await self._database.run(work)

    async def get(self, tenant: str, conversation_id: str) -> StoredConversation:
        """One conversation."""
        return await self._database.run(lambda c: _require(c, tenant, conversation_id))

    async def update(
        self, tenant: str, conversation_id: str, metadata: dict[str, str]
    ) -> StoredConversation:
        """Replace its metadata."""

        def work(connection: sqlite3.Connection) -> StoredConversation:
            _require(connection, tenant, conversation_id)
            connection.execute(
                "UPDATE conversations SET metadata = ?, expires_s = ? WHERE id = ?",
                (json.dumps(metadata), unix_s() + self._limits.retention_s, conversation_id),
            )
            return _require(connection, tenant, conversation_id)

        return await self._database.run(work)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """Delete it with its items."""

        def work(connection: sqlite3.Connection) -> None:
            _require(connection, tenant, conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))

        await self._database.run(work)

    async def append(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> None:
        """Add items at its end, all or none."""
        limits = self._limits
        await self._database.run(lambda c: append_items(c, limits, tenant, conversation_id, items))

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """All items in order."""

        def work(connection: sqlite3.Connection) -> list[Item]:
            _require(connection, tenant, conversation_id)
            rows = connection.execute(
                "SELECT packed FROM conversation_items WHERE conversation_id = ? ORDER BY position",
                (conversation_id,),
            )
            return [unpack(packed) for (packed,) in rows]

        return await self._database.run(work)

    async def page(
        self, tenant: str, conversation_id: str, *, after: str | None, limit: int, is_desc: bool
    ) -> list[Item]:
        """Up to `limit` items behind the one called `after`."""

        def work(connection: sqlite3.Connection) -> list[Item]:
            _require(connection, tenant, conversation_id)
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

        return await self._database.run(work)

    async def item(self, tenant: str, conversation_id: str, item_id: str) -> Item:
        """One item."""

        def work(connection: sqlite3.Connection) -> Item:
            _require(connection, tenant, conversation_id)
            row = connection.execute(
                "SELECT packed FROM conversation_items WHERE conversation_id = ? AND item_id = ?",
                (conversation_id, item_id),
            ).fetchone()
            if row is None:
                raise _no_item(item_id)
            found: Item = unpack(row[0])
            return found

        return await self._database.run(work)

    async def delete_item(
        self, tenant: str, conversation_id: str, item_id: str
    ) -> StoredConversation:
        """Delete one item."""

        def work(connection: sqlite3.Connection) -> StoredConversation:
            _require(connection, tenant, conversation_id)
            row = connection.execute(
                """DELETE FROM conversation_items WHERE conversation_id = ? AND item_id = ?
                    RETURNING raw_bytes, length(packed)""",
                (conversation_id, item_id),
            ).fetchone()
            if row is None:
                raise _no_item(item_id)
            _count(connection, conversation_id, -row[0], -row[1])
            return _require(connection, tenant, conversation_id)

        return await self._database.run(work)


def append_items(
    connection: sqlite3.Connection,
    limits: StoreLimits,
    tenant: str,
    conversation_id: str,
    items: Sequence[Item],
    *,
    skips_known: bool = False,
) -> None:
    """Add items; one that is there already is an error, or with `skips_known` nothing new."""
    _require(connection, tenant, conversation_id)
    rows = [(conversation_id, item["id"], raw_json(item), pack(item)) for item in items]
    num_bytes = sum(len(packed) for *_, packed in rows)
    make_room(connection, limits, tenant, num_bytes, num_values=0)
    for _, item_id, raw, packed in rows:
        made = connection.execute(
            """INSERT OR IGNORE INTO conversation_items
                (conversation_id, item_id, raw_bytes, packed) VALUES (?, ?, ?, ?)""",
            (conversation_id, item_id, len(raw), packed),
        )
        if made.rowcount:
            _count(connection, conversation_id, len(raw), len(packed))
        elif not skips_known:
            raise InvalidRequest(
                f"the conversation has an item with id '{item_id}' already",
                param="items",
                reason="duplicate_item",
            )
    _check_size(connection, conversation_id)
    connection.execute(
        "UPDATE conversations SET expires_s = ? WHERE id = ?",
        (unix_s() + limits.retention_s, conversation_id),
    )


def _check_size(connection: sqlite3.Connection, conversation_id: str) -> None:
    raw_bytes, count = connection.execute(
        """SELECT raw_bytes, (SELECT count(*) FROM conversation_items WHERE conversation_id = id)
            FROM conversations WHERE id = ?""",
        (conversation_id,),
    ).fetchone()
    check_value(raw_bytes, "the conversation", "items")
    if count > MAX_CONVERSATION_ITEMS:
        raise InvalidRequest(
            f"a conversation may have {MAX_CONVERSATION_ITEMS} items at most", param="items"
        )


def _count(
    connection: sqlite3.Connection, conversation_id: str, raw_bytes: int, num_bytes: int
) -> None:
    connection.execute(
        "UPDATE conversations SET raw_bytes = raw_bytes + ?, bytes = bytes + ? WHERE id = ?",
        (raw_bytes, num_bytes, conversation_id),
    )


def _require(
    connection: sqlite3.Connection, tenant: str, conversation_id: str
) -> StoredConversation:
    row: tuple[Any, ...] | None = connection.execute(
        """SELECT id, created_s, metadata FROM conversations
            WHERE id = ? AND tenant = ? AND expires_s >= ?""",
        (conversation_id, tenant, unix_s()),
    ).fetchone()
    if row is None:
        raise NotFound(f"Conversation with id '{conversation_id[:80]}' not found.", param="id")
    return StoredConversation(conversation_id=row[0], created_s=row[1], metadata=json.loads(row[2]))


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
