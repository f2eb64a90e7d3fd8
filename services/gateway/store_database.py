"""One SQLite file on a thread of its own: transactions in order, never on the event loop.

Several gateways of one host may share the file (WAL). See docs/adr/0011-where-responses-are-kept.md.
"""

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from finback.services.gateway.store_schema import SCHEMA, VERSION
from finback.shared.errors import ConfigError, Overloaded, Unavailable

T = TypeVar("T")
Transaction = Callable[[sqlite3.Connection], T]

BUSY_TIMEOUT_MS: Final = 5_000
# Transactions waiting for the thread; each takes well under a millisecond, a big one some tens.
MAX_WAITING: Final = 1_024
PAGE_BYTES: Final = 4_096


class Database:
    """Opened by `open`; every wait is bounded by what waits before it and the busy time-out."""

    def __init__(self, path: str, *, max_bytes: int) -> None:
        self.path = path
        self._max_pages = max(256, max_bytes // PAGE_BYTES)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._num_waiting = 0
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Create or open the file, readable by its owner alone. Raises `ConfigError`."""
        loop = asyncio.get_running_loop()
        try:
            self._connection = await loop.run_in_executor(self._thread, self._connect)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"cannot open the response store {self.path}: {error}; move the file away, or "
                "name another in store_path"
            ) from error

    async def run(self, transaction: Transaction[T]) -> T:
        """Run `transaction` on the thread; all of it is committed, or nothing.

        Raises `Overloaded`, and `Unavailable` if the file cannot be read or written.
        """
        return await self._queue(self._write, transaction)

    async def read(self, transaction: Transaction[T]) -> T:
        """`run` for one that only looks: it waits for no writer, even one that was stopped midway."""
        return await self._queue(self._read, transaction)

    async def _queue(
        self, how: Callable[[sqlite3.Connection, Transaction[T]], T], transaction: Transaction[T]
    ) -> T:
        if self._connection is None:
            raise _closed()
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded("the response store is busy", reason="store_busy", retry_after_s=1.0)
        self._num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, how, transaction
        )
        future.add_done_callback(self._note_done)
        return await future

    async def checkpoint(self) -> None:
        """Move the journal into the file and empty it: deleted text is in neither afterwards."""
        if self._connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._checkpoint)

    async def close(self) -> None:
        """Finish what waits, then close."""
        connection, self._connection = self._connection, None
        if connection is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, connection.close)
        self._thread.shutdown(wait=False)

    def _note_done(self, future: "asyncio.Future[T]") -> None:
        self._num_waiting -= 1
        if not future.cancelled():
            future.exception()  # whoever asked may have left

    def _connect(self) -> sqlite3.Connection:
        Path(self.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        # Only the store's thread uses it; it is merely closed by another name of that thread.
        made = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        made.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        made.execute(f"PRAGMA page_size={PAGE_BYTES}")
        made.execute("PRAGMA auto_vacuum=INCREMENTAL")
        made.execute("PRAGMA journal_mode=WAL")
        made.execute("PRAGMA synchronous=NORMAL")  # survives kill -9; a power cut may lose the last
        made.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten
        made.execute("PRAGMA foreign_keys=ON")
        made.execute(f"PRAGMA max_page_count={self._max_pages}")
        self._migrate(made)
        return made

    def _migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"its format is {version}, this release reads {VERSION}")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")

    def _checkpoint(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):  # a reader of another process: next time
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _run(
        self, how: Callable[[sqlite3.Connection, Transaction[T]], T], transaction: Transaction[T]
    ) -> T:
        connection = self._connection
        if connection is None:
            raise _closed()
        try:
            return how(connection, transaction)
        except sqlite3.Error as error:
            raise Unavailable(
                f"the response store cannot be used: {error}",
                reason="store_unavailable",
                retry_after_s=1.0,
            ) from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    @staticmethod
    def _write(connection: sqlite3.Connection, transaction: Transaction[T]) -> T:
        connection.execute("BEGIN IMMEDIATE")
        result = transaction(connection)
        connection.execute("COMMIT")
        return result

    @staticmethod
    def _read(connection: sqlite3.Connection, transaction: Transaction[T]) -> T:
        # One that wrote would find the file changed under it: refused, so that none does.
        connection.execute("PRAGMA query_only=ON")
        try:
            connection.execute("BEGIN")
            result = transaction(connection)
            connection.execute("COMMIT")
        finally:
            connection.execute("PRAGMA query_only=OFF")
        return result


def _closed() -> Unavailable:
    return Unavailable("the response store is closed", reason="store_unavailable")
