"""Counts what requests used and writes it down every second, off the event loop.

What is counted here and not written yet is lost if the process is killed: a second's worth. A store
that cannot be written (a full disk) costs a metric and is tried again; meanwhile sums grow in memory.
"""

import asyncio
import sqlite3
from typing import Any, Final

from finback.shared.clock import monotonic_s, unix_s
from finback.shared.errors import Unavailable
from finback.shared.telemetry.metrics import Metrics
from finback.shared.usage_store import HOUR_S, UsageCounts, UsageKey, UsageStore

FLUSH_S: Final = 1.0
# Sums that wait while the store cannot be written: beyond that many kinds the rest is not counted.
MAX_KINDS: Final = 65_536
_DAY_S: Final = 86_400


class UsageMeter:
    """Sums by hour, tenant, model and outcome on their way to the store."""

    def __init__(
        self, store: UsageStore, *, retention_days: int, metrics: Metrics, log: Any
    ) -> None:
        self.store = store
        self._retention_s = retention_days * _DAY_S
        self._metrics = metrics
        self._log = log
        self._waiting: dict[UsageKey, UsageCounts] = {}
        self._writing = asyncio.Lock()
        self._is_failing = False
        self._next_drop_s = 0.0

    def count(self, tenant: str, model: str, outcome: str, counts: UsageCounts) -> None:
        """Add to this hour's sums."""
        hour_s = int(unix_s() // HOUR_S * HOUR_S)
        key = UsageKey(hour_s=hour_s, tenant=tenant, model=model, outcome=outcome)
        self._add(key, counts)

    async def run(self) -> None:
        """Run in the service's task group."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.try_flush()

    async def try_flush(self) -> bool:
        """Write down what waits; False if that was not possible."""
        try:
            await self.flush()
        except Unavailable as error:
            self._metrics.count("finback.gateway.usage_failures")
            if not self._is_failing:  # once an outage
                self._log.warning("cannot write usage down", error=error.public_message)
            self._is_failing = True
            return False
        self._is_failing = False
        return True

    async def flush(self) -> None:
        """Write down what waits. Raises `Unavailable`; nothing is lost then."""
        async with self._writing:
            batch, self._waiting = self._waiting, {}
            try:
                if batch:
                    await asyncio.to_thread(self.store.add, batch)
                if monotonic_s() >= self._next_drop_s:
                    self._next_drop_s = monotonic_s() + HOUR_S
                    oldest_s = int((unix_s() - self._retention_s) // HOUR_S * HOUR_S)
                    batch = {}
                    await asyncio.to_thread(self.store.drop_before, oldest_s)
            except (sqlite3.Error, OSError) as error:
                self._put_back(batch)
                raise Unavailable(f"usage cannot be written: {error}", reason="usage") from error

    def _put_back(self, batch: dict[UsageKey, UsageCounts]) -> None:
        for key, counts in batch.items():
            self._add(key, counts)

    def _add(self, key: UsageKey, counts: UsageCounts) -> None:
        known = self._waiting.get(key)
        if known is None and len(self._waiting) >= MAX_KINDS:
            self._metrics.count("finback.gateway.usage_dropped")
            return
        self._waiting[key] = counts if known is None else known + counts
