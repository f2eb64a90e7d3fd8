"""The store of responses and conversations: one file, its parts, and its sweep."""

import asyncio
from pathlib import Path
from typing import Any, Final

from finback.services.gateway.store_conversations import ConversationStore
from finback.services.gateway.store_database import Database
from finback.services.gateway.store_events import EventLog
from finback.services.gateway.store_leases import LeaseStore
from finback.services.gateway.store_limits import StoreLimits
from finback.services.gateway.store_responses import ResponseStore
from finback.services.gateway.store_sweep import size_bytes, sweep
from finback.shared.config import StackConfig
from finback.shared.errors import ServingError
from finback.shared.telemetry.metrics import Metrics

SWEEP_S: Final = 30.0


class Store:
    """`responses`, `leases` of unfinished ones, `conversations` and `events` of all tenants."""

    def __init__(self, path: str, limits: StoreLimits, *, max_bytes: int) -> None:
        self.database = Database(path, max_bytes=max_bytes)
        self.responses = ResponseStore(self.database, limits)
        self.leases = LeaseStore(self.database, limits)
        self.conversations = ConversationStore(self.database, limits)
        self.events = EventLog(self.database)

    async def open(self) -> None:
        """Raises `ConfigError`."""
        await self.database.open()

    async def close(self) -> None:
        """Finish what waits."""
        await self.database.close()

    async def sweep_forever(self, metrics: Metrics, log: Any) -> None:
        """Run in the service's task group."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                num_gone = await sweep(self.database)
                metrics.gauge("finback.gateway.store_bytes", await self.database.read(size_bytes))
            except ServingError as error:
                log.warning("cannot sweep the response store", error=error.public_message)
                continue
            if num_gone:
                log.info("expired", num_values=num_gone)


def store_of(config: StackConfig) -> Store:
    """The store that the settings describe."""
    path = config.store_path or str(Path(config.run_dir) / "responses.sqlite")
    limits = StoreLimits(
        retention_s=config.store_retention_days * 86400.0,
        max_tenant_values=config.store_tenant_values,
        max_tenant_bytes=config.store_tenant_bytes,
    )
    return Store(path, limits, max_bytes=config.store_max_bytes)
