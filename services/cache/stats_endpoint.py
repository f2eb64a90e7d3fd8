"""`stats`: how full a cache is, of whom, and what has happened to blocks."""

from collections.abc import Iterator
from typing import Final

from finback.services.cache.block_endpoints import BlockEndpoints
from finback.services.cache.file_admin import FileAdmin
from finback.services.cache.store import KvStore
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.wire.messages.cache_admin import (
    PinInfo,
    PrefixUse,
    StatsReply,
    StatsRequest,
    Tally,
    TenantUsage,
    TierUsage,
    UseTally,
)

MAX_PREFIXES: Final = 100
MAX_TENANTS: Final = 20


class StatsEndpoint:
    """Answers for both tiers of one cache."""

    def __init__(
        self, service: Service, store: KvStore, blocks: BlockEndpoints, files: FileAdmin
    ) -> None:
        self._service = service
        self._store = store
        self._blocks = blocks
        self._files = files
        self._kept = store.arena.kept

    async def start(self) -> None:
        """Answer from now on."""
        await self._service.add_endpoint(
            "stats", StatsRequest, self._on_stats, scope="both", workers=2
        )

    async def _on_stats(self, call: Call[StatsRequest]) -> StatsReply:
        self._blocks.measure()
        arena, counts = self._store.arena, self._store.arena.counts()
        policy, config = self._store.policy, self._service.config
        files = await self._files.stats()
        return StatsReply(
            instance=self._service.instance,
            epoch=self._service.epoch,
            arena_bytes=arena.num_bytes,
            max_bytes=config.arena_bytes,
            num_leases=counts.num_leases,
            slots={
                "free": counts.num_free,
                "reserved": counts.num_reserved,
                "committed": counts.num_committed,
                "quarantined": counts.num_quarantined,
                "kept": counts.num_kept,
            },
            usage=(*self._host_usage(), *files.usage),
            tallies=tuple(
                Tally(what=what, label=label, count=count)
                for what, label, count in self._blocks.tallies.items()
            ),
            prefixes=tuple(self._prefixes(call.message.num_prefixes)),
            pins=tuple(self._pins()),
            file_bytes=files.num_bytes,
            file_max_bytes=files.max_bytes,
            file_state=files.state,
            num_waiting_writes=self._blocks.num_waiting_writes,
            uses=tuple(
                UseTally(what=what, traffic_class=class_, outcome=outcome, num_blocks=number)
                for what, class_, outcome, number in self._blocks.uses.items()
            ),
            tenants=tuple(self._tenants()),
            tenant_max_bytes=policy.tenant_bytes,
            state_max_bytes=policy.state_bytes,
            file_tenant_max_bytes=config.cache_dir_tenant_bytes,
        )

    def _host_usage(self) -> Iterator[TierUsage]:
        for (kind, class_), num_blocks in self._kept.num_blocks.items():
            if num_blocks:
                yield TierUsage(
                    tier="host",
                    kind=kind.name.lower(),
                    traffic_class=class_.name.lower(),
                    num_blocks=num_blocks,
                    num_bytes=self._kept.num_bytes[kind, class_],
                )

    def _prefixes(self, asked: int) -> Iterator[PrefixUse]:
        for salt, digest, count in self._store.top.top(max(0, min(asked, MAX_PREFIXES))):
            yield PrefixUse(
                salt=salt, hash=digest, num_reads=count.num_reads, num_blocks=count.num_blocks
            )

    def _pins(self) -> Iterator[PinInfo]:
        for name, (salt, hashes) in self._store.pins.pins.items():
            num_held = self._store.num_held(salt, hashes)
            yield PinInfo(name=name, salt=salt, num_blocks=len(hashes), num_held=num_held)

    def _tenants(self) -> Iterator[TenantUsage]:
        for digest, num_bytes in self._kept.tenant_bytes.most_common(MAX_TENANTS):
            yield TenantUsage(tenant=digest.hex(), num_bytes=num_bytes)
