"""The stored APIs put together: store, background jobs, handlers; opened and closed by the service."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from finback.services.gateway.conversations_api import ConversationsApi
from finback.services.gateway.endpoints import Endpoint
from finback.services.gateway.exchange import Exchange
from finback.services.gateway.responses_api import ResponsesApi
from finback.services.gateway.responses_attempt import Attempts
from finback.services.gateway.responses_endpoints import responses_endpoints
from finback.services.gateway.responses_jobs import Jobs
from finback.services.gateway.responses_sealed import Seals
from finback.services.gateway.store import Store, store_of
from finback.shared.actor.registry import Directory
from finback.shared.config import StackConfig
from finback.shared.kv.cluster_key import cluster_key
from finback.shared.telemetry.metrics import Metrics

# After a start, or a reconnect of another gateway, its lease may be missing for a moment.
GRACE_LEASES: Final = 2.0
# Background responses that are made at once.
MAX_RUNNING: Final = 64


class ResponsesRoom:
    """What belongs to `/v1/responses` and `/v1/conversations`."""

    def __init__(self, config: StackConfig, store: Store, jobs: Jobs, api: ResponsesApi) -> None:
        self.store = store
        self._config = config
        self._jobs = jobs
        self._api = api

    @property
    def endpoints(self) -> Iterable[Endpoint]:
        """For the table."""
        return responses_endpoints(self._api, ConversationsApi(self.store))

    def run(self, spawn: Callable[..., None], metrics: Metrics, log: Any) -> None:
        """Begin to adopt and to sweep."""
        spawn(self._jobs.adopt_forever, GRACE_LEASES * self._config.lease_ttl_s)
        spawn(self.store.sweep_forever, metrics, log)

    async def close(self) -> None:
        """Give back unfinished work; close the file."""
        await self._jobs.stop()
        await self.store.close()


async def open_responses(
    config: StackConfig,
    *,
    exchange: Exchange,
    directory: Directory,
    instance: str,
    metrics: Metrics,
    log: Any,
) -> ResponsesRoom:
    """Open the store. Raises `ConfigError` if its file cannot be used."""
    store, seals = store_of(config), Seals(cluster_key(config))
    await store.open()

    def is_alive(owner: str) -> bool:
        """Without a view of the registry nobody is declared dead."""
        return not directory.is_synced or directory.find(owner) is not None

    attempts = Attempts(
        exchange=exchange, store=store, seals=seals, timeout_s=config.request_timeout_s
    )
    jobs = Jobs(
        exchange=exchange,
        store=store,
        attempts=attempts,
        instance=instance,
        is_alive=is_alive,
        # Who waits for an answer comes first: half of the room is never background work's.
        num_running=min(MAX_RUNNING, max(1, config.max_open_requests // 2)),
        metrics=metrics,
        log=log,
    )
    api = ResponsesApi(
        exchange=exchange, store=store, jobs=jobs, seals=seals, metrics=metrics, log=log
    )
    return ResponsesRoom(config, store, jobs, api)
