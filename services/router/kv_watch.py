"""Feeds the index from all publishers of KV events, and has caches read ahead for placed requests."""

import contextlib
from typing import Final

import anyio

from finback.services.router.placer import Decision, Placer
from finback.services.router.prefix_index import HASH_BYTES
from finback.services.router.reach import CacheAt
from finback.shared.actor.service import Service
from finback.shared.clock import monotonic_s
from finback.shared.errors import ServingError
from finback.shared.kv.kv_subscriber import KvSubscriber
from finback.shared.wire.messages.cache_store import PrefetchCommand
from finback.shared.wire.messages.control import InstanceLost
from finback.shared.wire.messages.route import RouteRequest

_READY_WAIT_S: Final = 10.0
"""After a start, first snapshots are waited for this long; then whoever is silent holds nothing."""
_METRICS_S: Final = 1.0
_SWEEP_PAUSE_S: Final = 0.01
_MAX_PREFETCH: Final = 4_096  # blocks in one command
_COUNTED: Final = ("events", "duplicates", "gaps", "snapshots", "failures", "malformed", "restarts")


class KvWatch:
    """See the module. `is_ready`: whether the index may be trusted."""

    def __init__(self, service: Service, placer: Placer) -> None:
        self._service = service
        self._placer = placer
        self._subscriber = KvSubscriber(service, placer.index.open_view)
        self._caches: tuple[CacheAt, ...] = ()
        self._began_s = monotonic_s()
        self._is_ready = False
        self._counted: dict[str, int] = {}

    async def start(self) -> None:
        """Listen; called when the directory's changes are heard already."""
        self._began_s = monotonic_s()
        await self._subscriber.start()
        self.directory_changed()
        self._service.spawn(self._sweep)
        self._service.spawn(self._measure)

    @property
    def is_ready(self) -> bool:
        """Whether all first snapshots are there since the start, or were waited for in vain."""
        if not self._is_ready:
            is_whole = self._service.context.directory.is_synced
            is_whole = is_whole and not self._subscriber.num_waiting
            self._is_ready = is_whole or monotonic_s() - self._began_s > _READY_WAIT_S
        return self._is_ready

    def directory_changed(self) -> None:
        """Note which cache serves which host."""
        records = self._service.context.directory.instances("cache")
        caches = tuple(CacheAt(instance=r.instance, host=r.host) for r in records)
        if caches != self._caches:
            self._caches = caches
            self._placer.reaches.set_caches(caches)

    def instance_lost(self, lost: InstanceLost) -> None:
        """Known dead."""
        self._subscriber.instance_lost(lost)

    async def prefetch(self, request: RouteRequest, decision: Decision) -> None:
        """Tell the cache of the instance that computes to read what its device lacks."""
        device, _, file = decision.reach_blocks
        if file <= device:
            return
        placement = decision.placement
        computes = placement.decode if placement.is_local else placement.prefill
        file = min(file, device + _MAX_PREFETCH)
        command = PrefetchCommand(
            request_id=request.request_id,
            salt=computes.salt,
            hashes=request.block_hashes[HASH_BYTES * device : HASH_BYTES * file],
        )
        for cache in self._caches:
            if cache.host == computes.host:
                subject = self._service.subjects.instance("cache", cache.instance, "prefetch")
                with contextlib.suppress(ServingError):  # a hint
                    await self._service.client.publish(subject, command)
                    self._service.metrics.count("finback.router.prefetches")

    async def _sweep(self) -> None:
        """Strike out blocks that nobody holds, a 256th at a time."""
        index = self._placer.index
        while True:
            await anyio.sleep(_SWEEP_PAUSE_S if index.needs_sweep else _METRICS_S)
            if index.needs_sweep:
                index.sweep()

    async def _measure(self) -> None:
        metrics, index = self._service.metrics, self._placer.index
        while True:
            tiers: dict[str, int] = dict.fromkeys(("device", "host", "file"), 0)
            for (_, _, tier), size in index.num_held().items():
                tiers[tier] = tiers.get(tier, 0) + size
            for tier, size in tiers.items():
                metrics.gauge("finback.router.index_blocks_held", size, tier=tier)
            metrics.gauge("finback.router.index_blocks", len(index))
            metrics.gauge("finback.router.index_refused", index.num_refused)
            metrics.gauge("finback.router.kv_publishers", self._subscriber.num_followed)
            metrics.gauge("finback.router.kv_publishers_waiting", self._subscriber.num_waiting)
            counts = self._subscriber.counts()
            for name in _COUNTED:
                total = getattr(counts, f"num_{name}")
                metrics.count(f"finback.router.kv_{name}", total - self._counted.get(name, 0))
                self._counted[name] = total
            await anyio.sleep(_METRICS_S)
