"""What time takes away: expired values, old event logs, and their traces in the file."""

import sqlite3
from typing import Final

from finback.services.gateway.store_database import Database
from finback.shared.clock import unix_s

# A finished stream can be played again for so long.
EVENTS_KEEP_S: Final = 3600.0
_AT_ONCE: Final = 200
_VACUUM_PAGES: Final = 1_000


async def sweep(database: Database) -> int:
    """Delete what has expired, in short transactions; returns how many values went."""
    total = 0
    while True:
        num_gone = await database.run(_expire)
        total += num_gone
        if num_gone < _AT_ONCE:
            break
    await database.run(_forget_events)
    await database.run(_shrink)
    await database.checkpoint()
    return total


def size_bytes(connection: sqlite3.Connection) -> int:
    """What is in use of the file."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _expire(connection: sqlite3.Connection) -> int:
    now_s, num_gone = unix_s(), 0
    for table in ("responses", "conversations"):
        gone = connection.execute(
            f"""DELETE FROM {table} WHERE id IN
                (SELECT id FROM {table} WHERE expires_s < ? LIMIT ?)""",
            (now_s, _AT_ONCE),
        )
        num_gone = max(num_gone, gone.rowcount)
    return num_gone


def _forget_events(connection: sqlite3.Connection) -> None:
    connection.execute(
        """DELETE FROM events WHERE response_id IN (
            SELECT DISTINCT response_id FROM events JOIN responses ON id = response_id
            WHERE status NOT IN ('queued', 'in_progress') AND created_s < ?)""",
        (unix_s() - EVENTS_KEEP_S,),
    )


def _shrink(connection: sqlite3.Connection) -> None:
    """Give free pages back to the disk. One a statement: Python steps through it once only."""
    (num_free,) = connection.execute("PRAGMA freelist_count").fetchone()
    for _ in range(min(num_free, _VACUUM_PAGES)):
        connection.execute("PRAGMA incremental_vacuum(1)")
