"""Stored responses: each row holds its whole context, and a background one its lease.

A writer of an unfinished response names the epoch it claimed; once another has claimed, cancelled
or deleted it, the writer changes nothing and is told so.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from finback.services.gateway.store_conversations import append_items
from finback.services.gateway.store_database import Database
from finback.services.gateway.store_limits import (
    Item,
    StoreLimits,
    check_value,
    make_room,
    pack,
    raw_json,
    unpack,
)
from finback.shared.clock import unix_s
from finback.shared.errors import NotFound

UNFINISHED: Final = ("queued", "in_progress")
_COLUMNS: Final = "id, tenant, created_s, status, is_background, owner, epoch, num_attempts, body"


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


class ResponseStore:
    """The table of responses."""

    def __init__(self, database: Database, limits: StoreLimits) -> None:
        self._database = database
        self._limits = limits

    async def keep(self, kept: Kept) -> None:
        """Write a finished response, and what its conversation gains, at once."""

        def work(connection: sqlite3.Connection) -> None:
            if kept.is_stored:
                self._insert(connection, kept, plan=None)
                _index_items(connection, kept)
            _join_conversation(connection, kept, self._limits)

        await self._database.run(work)

    async def queue(self, kept: Kept, plan: dict[str, Any], owner: str) -> None:
        """Write a background response that is to be made."""
        await self._database.run(lambda c: self._insert(c, kept, plan=plan, owner=owner))

    async def get(
        self, tenant: str, response_id: str, *, with_items: bool = False
    ) -> Stored | None:
        """A tenant's response; another's is not there."""
        columns = f"{_COLUMNS}, items" if with_items else _COLUMNS

        def work(connection: sqlite3.Connection) -> Stored | None:
            query = f"SELECT {columns} FROM responses WHERE id = ? AND tenant = ?"
            row = connection.execute(query, (response_id, tenant)).fetchone()
            return None if row is None or _is_expired(connection, response_id) else _stored(row)

        return await self._database.run(work)

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

        return await self._database.run(work)

    # -- unfinished ones

    async def unfinished(self) -> list[tuple[str, str, int]]:
        """(response, owner, epoch) of all that are to be made or being made."""

        def work(connection: sqlite3.Connection) -> list[tuple[str, str, int]]:
            query = "SELECT id, owner, epoch FROM responses WHERE status IN (?, ?)"
            return connection.execute(query, UNFINISHED).fetchall()

        return await self._database.run(work)

    async def claim(self, response_id: str, epoch: int, owner: str) -> Stored | None:
        """Become the one who makes it, if nobody has since `epoch`; the new epoch is in it."""

        def work(connection: sqlite3.Connection) -> Stored | None:
            query = f"SELECT {_COLUMNS}, items, plan FROM responses WHERE id = ? AND epoch = ?"
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
            return _stored(again)

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
            _index_items(connection, kept)
            _join_conversation(connection, kept, self._limits)
            return True

        return await self._database.run(work)

    async def cancel(self, tenant: str, response_id: str) -> Stored | None:
        """Cancel it if it is not finished; returns what it is now."""

        def work(connection: sqlite3.Connection) -> Stored | None:
            query = f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND tenant = ?"
            row = connection.execute(query, (response_id, tenant)).fetchone()
            if row is None or row[3] not in UNFINISHED:
                return None if row is None else _stored(row)
            body = {**unpack(row[8]), "status": "cancelled"}
            connection.execute(
                """UPDATE responses SET status = 'cancelled', body = ?, plan = NULL, owner = '',
                    epoch = epoch + 1 WHERE id = ?""",
                (pack(body), response_id),
            )
            return _stored(connection.execute(query, (response_id, tenant)).fetchone())

        return await self._database.run(work)

    def _insert(
        self,
        connection: sqlite3.Connection,
        kept: Kept,
        *,
        plan: dict[str, Any] | None,
        owner: str = "",
    ) -> None:
        raw_body, raw_items = raw_json(kept.body), raw_json(list(kept.items))
        check_value(len(raw_body) + len(raw_items), "the response with its context", "input")
        body, items = pack(kept.body), pack(list(kept.items))
        packed_plan = pack(plan) if plan is not None else None
        num_bytes = len(body) + len(items) + len(packed_plan or b"")
        make_room(connection, self._limits, kept.tenant, num_bytes)
        now_s = unix_s()
        connection.execute(
            f"INSERT INTO responses VALUES ({', '.join('?' * 13)})",
            (
                kept.response_id,
                kept.tenant,
                now_s,
                now_s + self._limits.retention_s,
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


def _stored(row: tuple[Any, ...]) -> Stored:
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
        items=tuple(unpack(row[9])) if len(row) > 9 else (),
        plan=unpack(plan) if plan is not None else None,
    )


def _is_expired(connection: sqlite3.Connection, response_id: str) -> bool:
    """What waits for the sweep is gone already."""
    query = "SELECT 1 FROM responses WHERE id = ? AND expires_s < ?"
    return connection.execute(query, (response_id, unix_s())).fetchone() is not None


def _index_items(connection: sqlite3.Connection, kept: Kept) -> None:
    ids = {item["id"] for item in (*kept.own_items, *kept.body["output"])}
    connection.executemany(
        "INSERT OR IGNORE INTO item_index VALUES (?, ?)",
        [(item_id, kept.response_id) for item_id in ids],
    )


def _join_conversation(connection: sqlite3.Connection, kept: Kept, limits: StoreLimits) -> None:
    if kept.conversation_id is None or kept.body["status"] not in ("completed", "incomplete"):
        return
    items = [*kept.own_items, *kept.body["output"]]
    # A conversation that was deleted meanwhile gains nothing; the response is kept all the same.
    with contextlib.suppress(NotFound):
        append_items(connection, limits, kept.tenant, kept.conversation_id, items, skips_known=True)


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
    candidates: list[Item] = [*unpack(row[0])["output"], *unpack(row[1])]
    return next((item for item in candidates if item["id"] == item_id), None)
