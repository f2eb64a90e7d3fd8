"""Items at the end of a conversation, and the sums that bound it."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finback.services.gateway.store_limits import (
    MAX_CONVERSATION_ITEMS,
    Item,
    StoreLimits,
    check_value,
    compress,
    make_room,
    raw_json,
)
from finback.shared.clock import unix_s
from finback.shared.errors import InvalidRequest, NotFound


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """A conversation without its items."""

    conversation_id: str
    created_s: float
    metadata: dict[str, str]


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
    require(connection, tenant, conversation_id)
    raws = [(item["id"], raw_json(item)) for item in items]
    rows = [(item_id, raw, compress(raw)) for item_id, raw in raws]
    num_bytes = sum(len(packed) for *_, packed in rows)
    make_room(connection, limits, tenant, num_bytes, num_values=0)
    for item_id, raw, packed in rows:
        made = connection.execute(
            """INSERT OR IGNORE INTO conversation_items
                (conversation_id, item_id, raw_bytes, packed) VALUES (?, ?, ?, ?)""",
            (conversation_id, item_id, len(raw), packed),
        )
        if made.rowcount:
            count_bytes(connection, conversation_id, len(raw), len(packed))
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


def count_bytes(
    connection: sqlite3.Connection, conversation_id: str, raw_bytes: int, num_bytes: int
) -> None:
    """Keep a conversation's sums: `raw_bytes` of JSON, `num_bytes` as stored."""
    connection.execute(
        "UPDATE conversations SET raw_bytes = raw_bytes + ?, bytes = bytes + ? WHERE id = ?",
        (raw_bytes, num_bytes, conversation_id),
    )


def require(
    connection: sqlite3.Connection, tenant: str, conversation_id: str
) -> StoredConversation:
    """A tenant's conversation; `NotFound` if it has none of that id."""
    row: tuple[Any, ...] | None = connection.execute(
        """SELECT id, created_s, metadata FROM conversations
            WHERE id = ? AND tenant = ? AND expires_s >= ?""",
        (conversation_id, tenant, unix_s()),
    ).fetchone()
    if row is None:
        raise NotFound(
            f"Conversation with id '{conversation_id[:80]}' not found.", param="conversation_id"
        )
    return StoredConversation(conversation_id=row[0], created_s=row[1], metadata=json.loads(row[2]))
