"""Rows of responses: what is read from one, and what is written into one."""

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from finback.services.gateway.store_append import append_items
from finback.services.gateway.store_limits import (
    Item,
    StoreLimits,
    check_value,
    compress,
    make_room,
    pack,
    raw_items,
    raw_json,
    unpack,
    unpack_items,
)
from finback.shared.clock import unix_s
from finback.shared.errors import NotFound

UNFINISHED: Final = ("queued", "in_progress")
COLUMNS: Final = "id, tenant, created_s, status, is_background, owner, epoch, num_attempts, body"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A response as it is kept. `body`: the document; `items`: its whole input, where asked for."""

    response_id: str
    tenant: str
    created_s: float
    status: str
    is_background: bool
    owner: str
    epoch: int
    num_attempts: int
    body: dict[str, Any]
    items: tuple[Item, ...] = ()
    plan: dict[str, Any] | None = None

    @property
    def is_finished(self) -> bool:
        return self.status not in UNFINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is to be kept of a finished response.

    `own_items`: the input that this request brought; they and the output join the conversation.
    `is_stored` false: only the conversation gets them.
    """

    response_id: str
    tenant: str
    body: dict[str, Any]
    items: Sequence[Item]
    own_items: Sequence[Item] = ()
    conversation_id: str | None = None
    is_stored: bool = True


def insert(
    connection: sqlite3.Connection,
    kept: Kept,
    limits: StoreLimits,
    *,
    plan: dict[str, Any] | None = None,
    owner: str = "",
) -> None:
    """A new row. `plan`: it is a background response that is to be made."""
    raw_body, raw_context = raw_json(kept.body), raw_items(kept.items)
    check_value(len(raw_body) + len(raw_context), "the response with its context", "input")
    body, items = compress(raw_body), compress(raw_context)
    packed_plan = pack(plan) if plan is not None else None
    num_bytes = len(body) + len(items) + len(packed_plan or b"")
    make_room(connection, limits, kept.tenant, num_bytes)
    now_s = unix_s()
    connection.execute(
        f"INSERT INTO responses VALUES ({', '.join('?' * 13)})",
        (
            kept.response_id,
            kept.tenant,
            now_s,
            now_s + limits.retention_s,
            kept.body["status"],
            plan is not None,
            owner,
            0,
            0,
            num_bytes,
            body,
            items,
            packed_plan,
        ),
    )


def stored_of(row: tuple[Any, ...]) -> Stored:
    """A row of `COLUMNS`, with or without `items` and `plan`."""
    plan = row[10] if len(row) > 10 else None
    return Stored(
        response_id=row[0],
        tenant=row[1],
        created_s=row[2],
        status=row[3],
        is_background=bool(row[4]),
        owner=row[5],
        epoch=row[6],
        num_attempts=row[7],
        body=unpack(row[8]),
        items=tuple(unpack_items(row[9])) if len(row) > 9 else (),
        plan=unpack(plan) if plan is not None else None,
    )


def index_items(connection: sqlite3.Connection, kept: Kept) -> None:
    """Let `item_reference`s find them."""
    ids = {item["id"] for item in (*kept.own_items, *kept.body["output"])}
    connection.executemany(
        "INSERT OR IGNORE INTO item_index VALUES (?, ?)",
        [(item_id, kept.response_id) for item_id in ids],
    )


def join_conversation(connection: sqlite3.Connection, kept: Kept, limits: StoreLimits) -> None:
    """Append input and output to the conversation, if the response came to something."""
    if kept.conversation_id is None or kept.body["status"] not in ("completed", "incomplete"):
        return
    items = [*kept.own_items, *kept.body["output"]]
    # A conversation that was deleted meanwhile gains nothing; the response is kept all the same.
    with contextlib.suppress(NotFound):
        append_items(connection, limits, kept.tenant, kept.conversation_id, items, skips_known=True)
