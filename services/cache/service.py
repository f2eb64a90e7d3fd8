"""The cache service's endpoints and its clock; the arena itself is in `arena.py`."""

import time
from pathlib import Path
from typing import ClassVar, Final

import anyio
from anyio import to_thread

from finback.services.cache.admin_endpoints import AdminEndpoints
from finback.services.cache.arena import MAX_BLOCK_BYTES, MAX_BLOCKS, Arena
from finback.services.cache.arena_files import ArenaFiles
from finback.services.cache.block_endpoints import BlockEndpoints
from finback.services.cache.elsewhere import Elsewhere
from finback.services.cache.exchange_folder import ExchangeFolder, exchange_folder
from finback.services.cache.file_admin import FileAdmin
from finback.services.cache.file_tier import FileTier
from finback.services.cache.forget_endpoint import ForgetEndpoint
from finback.services.cache.growth import Growth
from finback.services.cache.holdings import Holdings
from finback.services.cache.kept import Now
from finback.services.cache.slots import size_class
from finback.services.cache.stats_endpoint import StatsEndpoint
from finback.services.cache.store import KvStore
from finback.services.cache.store_policy import store_policy
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.clock import monotonic_s, unix_s
from finback.shared.errors import Unavailable
from finback.shared.kv.kv_subscriber import KvSubscriber
from finback.shared.wire.messages.cache import (
    ArenaReply,
    ArenaRequest,
    CommitRequest,
    LeaseReply,
    LeaseRequest,
    ReserveReply,
    ReserveRequest,
)
from finback.shared.wire.messages.control import InstanceLost

# Small enough not to hold much of a laptop's memory for one prompt, large enough to be few.
EXTENT_BYTES: Final = 64 * 1024 * 1024
TICK_S: Final = 1.0
_REAP_EVERY: Final = 5  # ticks
_CHECK_EVERY: Final = 60  # ticks
CLOCK_SLACK_S: Final = 60.0  # of the wall clock, which is set now and then


class CacheService(Service):
    """Hands out slots of the arena under leases, and keeps blocks in it.

    A restart goes on with what the arena holds.
    """

    name: ClassVar[str] = "cache"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._arena: Arena | None = None
        self._store: KvStore | None = None
        self._nonce = ""
        self._latest_wall_s = unix_s()

    async def start(self) -> None:
        """Adopt the arena, then answer."""
        folder = Path(self.config.shm_dir) / self.config.stack_id
        await to_thread.run_sync(self._open, folder)
        for verb, request_type, handler in (
            ("arena", ArenaRequest, self._on_arena),
            ("reserve", ReserveRequest, self._on_reserve),
            ("commit", CommitRequest, self._on_commit),
            ("renew", LeaseRequest, self._on_renew),
            ("release", LeaseRequest, self._on_release),
        ):
            # One worker: order is kept.
            await self.add_endpoint(verb, request_type, handler, scope="both", workers=1)
        self.growth = Growth(self.arena, self.metrics)
        self._holdings = Holdings(self, self.store)
        self._tier = FileTier(
            self, on_change=self._holdings.files_changed, take_pins=self.store.merge_pins
        )
        self._holdings.tier = self._tier
        self._blocks = BlockEndpoints(self, self.store, self._tier, self.growth)
        await self._blocks.start()
        await self._holdings.start()
        await self._tier.start()
        if self.config.cache_store_once:
            elsewhere = self.store.elsewhere = Elsewhere(self.instance)
            await KvSubscriber(self, elsewhere.open_view).start()
        files = FileAdmin(self._tier, ExchangeFolder(exchange_folder(self.config)))
        await StatsEndpoint(self, self.store, self._blocks, files).start()
        await AdminEndpoints(self, self.store, self._blocks, files).start()
        await ForgetEndpoint(self, self.store, files, self._blocks.forgotten).start()
        lost = self.subjects.event("supervisor", "instance-lost")
        await self.listen(lost, InstanceLost, self._on_instance_lost)
        self.spawn(self._tick)

    async def stop(self) -> None:
        """Leave the arena to the next process."""
        if self._arena is not None:
            await self._blocks.stop()
            await self._tier.stop()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def _open(self, folder: Path) -> None:
        files = ArenaFiles(folder, max_bytes=self.config.arena_bytes, extent_bytes=EXTENT_BYTES)
        arena = Arena(files, now_s=monotonic_s(), wall_s=unix_s())
        self._nonce = files.write_probe()
        self._arena, self._store = arena, KvStore(arena, store_policy(self.config))
        self.log.info("arena", folder=str(folder), num_adopted=arena.num_adopted)
        if arena.num_damaged:
            self.metrics.count("finback.cache.damaged_headers", arena.num_damaged)
            self.log.warning("damaged slot headers", num_slots=arena.num_damaged)
        if arena.removed:
            self.metrics.count("finback.cache.arena_files_removed", len(arena.removed))
            self.log.warning("arena files that cannot be used are removed", files=arena.removed)

    @property
    def arena(self) -> Arena:
        """The arena, between start and stop."""
        if self._arena is None:
            raise Unavailable("the arena is closed")
        return self._arena

    @property
    def store(self) -> KvStore:
        """The store, between start and stop."""
        if self._store is None:
            raise Unavailable("the arena is closed")
        return self._store

    async def _on_arena(self, call: Call[ArenaRequest]) -> ArenaReply:
        return ArenaReply(
            path=str(self.arena.folder),
            nonce=self._nonce,
            instance=self.instance,
            epoch=self.epoch,
        )

    async def _on_reserve(self, call: Call[ReserveRequest]) -> ReserveReply:
        request, started = call.message, time.perf_counter()
        if 0 < request.block_bytes <= MAX_BLOCK_BYTES and 0 < request.num_blocks <= MAX_BLOCKS:
            slot_bytes = size_class(request.block_bytes)
            await self.growth.make_room(slot_bytes, request.num_blocks, is_brief=True)
        reply = self.arena.reserve(request, monotonic_s())
        asked, given = call.message.num_blocks, len(reply.slots)
        self.metrics.observe("finback.cache.reserve_duration", time.perf_counter() - started)
        self.metrics.count("finback.cache.slots", given, outcome="reserved")
        if given < asked:
            self.metrics.count("finback.cache.slots", asked - given, outcome="refused")
        return reply

    async def _on_commit(self, call: Call[CommitRequest]) -> LeaseReply:
        self._blocks.committed(self.store.commit(call.message, self.store.clocks.now()))
        num_slots = len(call.message.slot_ids)
        self.metrics.count("finback.cache.slots", num_slots, outcome="committed")
        return LeaseReply(held=(call.message.lease_id,))

    async def _on_renew(self, call: Call[LeaseRequest]) -> LeaseReply:
        return LeaseReply(held=tuple(self.arena.renew(call.message.lease_ids, monotonic_s())))

    async def _on_release(self, call: Call[LeaseRequest]) -> LeaseReply:
        await self._blocks.released(call.message.lease_ids)
        return LeaseReply(held=tuple(self.arena.release(call.message.lease_ids)))

    def _on_instance_lost(self, lost: InstanceLost) -> None:
        if self._arena is None:
            return
        num_freed = self._arena.writer_lost(lost.instance, lost.epoch)
        if num_freed:
            self.log.info("writer died", writer=lost.instance, num_freed=num_freed)

    async def _tick(self) -> None:
        num_ticks = 0
        while self._arena is not None:
            num_ticks += 1
            now = self._now()
            num_expired = self.arena.expire(now.mono_s, self._is_registered)
            if num_expired:
                self.metrics.count("finback.cache.leases_expired", num_expired)
                self.log.warning("leases expired", num_leases=num_expired)
            self.store.sweep(now)
            if num_ticks % _REAP_EVERY == 0:
                self.arena.reap_writers()
                self._check_files()
            if num_ticks % _CHECK_EVERY == 0:
                self.arena.check_integrity()
            self._measure()
            await self._blocks.tick()
            await anyio.sleep(TICK_S)

    def _check_files(self) -> None:
        """End this process if its arena was taken away: the next one begins with what is left."""
        missing = self.arena.missing()
        if missing:
            self.metrics.count("finback.cache.arena_lost")
            folder = str(self.arena.folder)
            self.log.error("the arena's files are gone", folder=folder, files=missing[:8])
            raise Unavailable("the arena's files were removed or cut", reason="arena")

    def _now(self) -> Now:
        """The time; notices when what is believed of the wall clock was set back."""
        now = self.store.clocks.now()
        if now.wall_s < self._latest_wall_s - CLOCK_SLACK_S:
            num_changed = self.store.clock_went_back(now)
            self.log.warning(
                "the clock went back",
                seconds=self._latest_wall_s - now.wall_s,
                num_blocks=num_changed,
            )
        self._latest_wall_s = now.wall_s
        return now

    def _is_registered(self, owner: str, epoch: int) -> bool:
        directory = self.context.directory
        if not directory.is_synced:
            return True  # an empty view proves nothing
        found = directory.find(owner)
        return found is not None and found.epoch <= epoch

    def _measure(self) -> None:
        counts = self.arena.counts()
        for state, value in (
            ("free", counts.num_free),
            ("reserved", counts.num_reserved),
            ("committed", counts.num_committed),
            ("quarantined", counts.num_quarantined),
            ("kept", counts.num_kept),
        ):
            self.metrics.gauge("finback.cache.num_slots", value, state=state)
        self.metrics.gauge("finback.cache.num_leases", counts.num_leases)
        self.metrics.gauge("finback.cache.arena_size_bytes", self.arena.num_bytes)
