"""The SQLite file of the index: how it is opened, when it commits, how damage shows.

Write-ahead log with an exclusive lock: one process, one connection, no shared-memory file, so it
works on network file systems as well. What a commit lost is found again in the segments.
"""

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

SCHEMA_VERSION: Final = 1
_COMMIT_EVERY: Final = 256  # changes

_SCHEMA: Final = """
CREATE TABLE names (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY, salt INTEGER NOT NULL, hash BLOB NOT NULL, tenant INTEGER NOT NULL,
    class INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    span INTEGER NOT NULL, length INTEGER NOT NULL, checksum BLOB NOT NULL,
    is_packed INTEGER NOT NULL, is_own INTEGER NOT NULL, expires REAL NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, first_block INTEGER NOT NULL, UNIQUE (salt, hash));
CREATE INDEX blocks_place ON blocks (segment, offset);
CREATE INDEX blocks_age ON blocks (is_own, class, used);
CREATE INDEX blocks_tenant ON blocks (tenant);
CREATE INDEX blocks_expiry ON blocks (expires) WHERE expires > 0;
CREATE TABLE segments (
    id INTEGER PRIMARY KEY, path TEXT NOT NULL, size INTEGER NOT NULL, holes INTEGER NOT NULL,
    created REAL NOT NULL, is_own INTEGER NOT NULL);
CREATE TABLE pinned (
    salt INTEGER NOT NULL, hash BLOB NOT NULL, name TEXT NOT NULL,
    PRIMARY KEY (salt, hash, name)) WITHOUT ROWID;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class IndexDamaged(Exception):
    """The index cannot be used; it has to be built again from the segments."""


class Database:
    """One connection, in one long transaction that is committed now and then. Not thread-safe."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: in memory. Raises `IndexDamaged`."""
        self.path = path
        try:
            if path is not None:
                # SQLite gives what it keeps beside a file the same mode.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
            self._connection = sqlite3.connect(
                str(path or ":memory:"), isolation_level=None, check_same_thread=False, timeout=1.0
            )
        except (sqlite3.Error, OSError) as error:
            raise IndexDamaged(str(error)) from error
        self._num_changes = 0
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self.run("PRAGMA locking_mode = EXCLUSIVE")
        self.run("PRAGMA journal_mode = WAL")
        self.run("PRAGMA synchronous = NORMAL")
        version = self.run("PRAGMA user_version")[0][0]
        num_tables = self.run("SELECT count(*) FROM sqlite_master")[0][0]
        if not version and not num_tables:
            self._create()
        elif version != SCHEMA_VERSION:
            raise IndexDamaged(f"its schema is {version}, this program's {SCHEMA_VERSION}")
        self.run("BEGIN")

    def _create(self) -> None:
        for statement in _SCHEMA.strip().split(";\n"):
            self.run(statement)
        self.run(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def check(self) -> None:
        """Look at every page. Raises `IndexDamaged`."""
        found = self.run("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise IndexDamaged(str(found[0][0]).replace("\n", " "))

    def run(self, statement: str, values: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows of a statement. Raises `IndexDamaged`."""
        try:
            return self._connection.execute(statement, tuple(values)).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise IndexDamaged(str(error)) from error

    def change(self, statement: str, values: Iterable[Any] = ()) -> int:
        """Change rows; returns how many. Committed with the next `_COMMIT_EVERY` others."""
        try:
            cursor = self._connection.execute(statement, tuple(values))
        except (sqlite3.Error, OverflowError) as error:
            raise IndexDamaged(str(error)) from error
        self._num_changes += 1
        return cursor.rowcount

    def commit_if_due(self) -> None:
        """To be called where the tables agree with each other."""
        if self._num_changes >= _COMMIT_EVERY:
            self.commit()

    def commit(self) -> None:
        """Make all changes last. Raises `IndexDamaged`."""
        self._num_changes = 0
        self.run("COMMIT")
        self.run("BEGIN")

    def close(self) -> None:
        """Commit and close. Raises `IndexDamaged`."""
        try:
            self.run("COMMIT")
        finally:
            self._connection.close()

    def abandon(self) -> None:
        """Close without a commit."""
        self._connection.close()


def discard(path: Path) -> None:
    """Remove an index file and what SQLite keeps beside it."""
    for end in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + end).unlink(missing_ok=True)
