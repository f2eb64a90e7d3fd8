"""What tenants have used, counted by hour: an SQLite file that several gateways of a host share.

Rows are (hour, tenant, model, outcome) with sums, so that the file grows with the kinds of use and
not with requests; hours beyond the retention are dropped. Every call blocks: keep it off event loops.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finback.shared.config import StackConfig

HOUR_S: Final = 3600
# How long a writer waits for another one.
BUSY_TIMEOUT_S: Final = 5.0
OUTCOMES: Final = ("completed", "cancelled", "failed", "refused")

_TABLE: Final = """
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, outcome TEXT NOT NULL,
    num_requests INTEGER NOT NULL, num_prompt_tokens INTEGER NOT NULL,
    num_cached_tokens INTEGER NOT NULL, num_completion_tokens INTEGER NOT NULL,
    PRIMARY KEY (hour, tenant, model, outcome)
) WITHOUT ROWID
"""
_ADD: Final = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (hour, tenant, model, outcome) DO UPDATE SET
    num_requests = num_requests + excluded.num_requests,
    num_prompt_tokens = num_prompt_tokens + excluded.num_prompt_tokens,
    num_cached_tokens = num_cached_tokens + excluded.num_cached_tokens,
    num_completion_tokens = num_completion_tokens + excluded.num_completion_tokens
"""
_READ: Final = """
SELECT hour, tenant, model, outcome,
    num_requests, num_prompt_tokens, num_cached_tokens, num_completion_tokens
FROM usage WHERE hour >= ? AND (? IS NULL OR tenant = ?)
ORDER BY hour, tenant, model, outcome LIMIT ?
"""


def usage_path(config: StackConfig) -> Path:
    """Where a stack's usage is counted: as set, else in its run directory."""
    return Path(config.usage_file or Path(config.run_dir) / "usage.sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageKey:
    """What is counted together. `hour_s`: Unix seconds of its beginning."""

    hour_s: int
    tenant: str
    model: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageCounts:
    """Sums. Cached tokens are part of the prompt's."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0

    def __add__(self, other: "UsageCounts") -> "UsageCounts":
        return UsageCounts(
            num_requests=self.num_requests + other.num_requests,
            num_prompt_tokens=self.num_prompt_tokens + other.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens + other.num_cached_tokens,
            num_completion_tokens=self.num_completion_tokens + other.num_completion_tokens,
        )


class UsageStore:
    """One file; opened anew for each call, so that any thread may call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, rows: Mapping[UsageKey, UsageCounts]) -> None:
        """Add to the sums, all or nothing. Raises `sqlite3.Error` or `OSError`."""
        with self._open() as db, db:
            db.executemany(_ADD, (_row(key, counts) for key, counts in rows.items()))

    def drop_before(self, hour_s: int) -> int:
        """Forget what is older; returns how many rows that were."""
        with self._open() as db, db:
            return db.execute("DELETE FROM usage WHERE hour < ?", (hour_s,)).rowcount

    def read(
        self, *, since_s: float = 0, tenant: str | None = None, limit: int = 100_000
    ) -> list[tuple[UsageKey, UsageCounts]]:
        """Rows of the hours from `since_s` on, oldest first; no file means none."""
        if not self._path.exists():
            return []
        first = int(since_s // HOUR_S * HOUR_S)
        with self._open() as db:
            return list(_rows(db.execute(_READ, (first, tenant, tenant, limit))))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._path.touch(mode=0o600)
        with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute(_TABLE)
            yield db


def _row(key: UsageKey, counts: UsageCounts) -> tuple[object, ...]:
    return (
        key.hour_s,
        key.tenant,
        key.model,
        key.outcome,
        counts.num_requests,
        counts.num_prompt_tokens,
        counts.num_cached_tokens,
        counts.num_completion_tokens,
    )


def _rows(found: Iterable[tuple[object, ...]]) -> Iterator[tuple[UsageKey, UsageCounts]]:
    for hour_s, tenant, model, outcome, requests, prompt, cached, completion in found:
        key = UsageKey(
            hour_s=int(str(hour_s)), tenant=str(tenant), model=str(model), outcome=str(outcome)
        )
        yield (
            key,
            UsageCounts(
                num_requests=int(str(requests)),
                num_prompt_tokens=int(str(prompt)),
                num_cached_tokens=int(str(cached)),
                num_completion_tokens=int(str(completion)),
            ),
        )
