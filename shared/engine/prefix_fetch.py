"""Brings cached blocks of a prompt into the device pool before the prompt is queued.

What the pool has is held; of what it lacks, the cache's leading run is read, as far as that is quicker
than to compute it. Blocks are copied off the event loop, a few at a time, and go into the pool between
steps. Whatever goes wrong ends the run there: the rest is computed. A prompt that is computed here at
once, by an engine that is idle, need not wait for them: they come layer by layer behind its back.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from anyio import CapacityLimiter, to_thread

from finback.shared.clock import monotonic_s
from finback.shared.engine.arrival import Arrival
from finback.shared.engine.block_copies import BAD, BlockCopier, Wanted
from finback.shared.engine.layer_copy import Incoming
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.sequence import TokenIds
from finback.shared.engine.state_exchange import StateExchange
from finback.shared.kv.cache_client import MAX_READ, CacheClient, CacheLease, StoreTerms
from finback.shared.kv.fetch_policy import RateBook
from finback.shared.kv.stored_block import geometry_of, payload_bytes
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.select import LaneSet
from finback.shared.lanes.shm import KIND as SHM
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from finback.shared.engine.engine import Engine  # brings torch; the caller built it

MAX_FETCH_S: Final = 5.0
"""A fetch that is not over by then is cut short."""
MIN_ARRIVING: Final = 4
"""Fewer blocks are not worth cutting a step into parts."""
MAX_ARRIVING: Final = 2
"""Threads that copy behind steps, of all requests together."""


@dataclass(slots=True, kw_only=True)
class Fetched:
    """A hold on a prompt's prefix, and how it came about. `miss`: why the run ended, if it did."""

    hold: PrefixHold
    num_found: int = 0
    num_from_files: int = 0
    miss: str = ""
    at_once: bool = False


class PrefixFetcher:
    """One for an engine; bounds what all its requests have in flight."""

    def __init__(
        self,
        engine: "Engine",
        cache: CacheClient,
        lanes: LaneSet,
        metrics: Metrics,
        *,
        by_layers: bool = True,
    ) -> None:
        """`by_layers`: steps may begin before all layers of a prefix are there."""
        self.by_layers = by_layers
        self._engine = engine
        self._prefixes = engine.prefixes
        self._cache = cache
        self._metrics = metrics
        self._block_size = engine.cache_spec.block_size
        self._payload_bytes = payload_bytes(geometry_of(engine.cache_spec))
        self._copier = BlockCopier(engine.prefixes, cache, lanes, self._payload_bytes)
        self._book = RateBook()
        self._threads = CapacityLimiter(MAX_ARRIVING)
        self._arrivals: set[asyncio.Task[None]] = set()
        self.states: StateExchange | None = None

    def may_help(self, token_ids: TokenIds, cache_salt: bytes) -> bool:
        """Could a fetch bring anything: is there a cache, and does the pool lack a block?"""
        if not self._cache.is_there or not self._prefixes.is_enabled:
            return False
        # Whether state is here is only known once it is known which blocks are.
        return self.states is not None or self._prefixes.lacks(token_ids, cache_salt)

    async def fetch(
        self,
        token_ids: TokenIds,
        cache_salt: bytes,
        terms: StoreTerms,
        parent: Any = None,
        *,
        at_once: bool = False,
    ) -> Fetched:
        """Hold and bring what there is of these known tokens. The caller owns the hold.

        `at_once`: the sequence (mode full) gets into this engine right afterwards; blocks may then still
        be coming. Raises nothing but what ends the caller (cancellation): then nothing is held.
        """
        fetched = Fetched(hold=self._prefixes.hold(token_ids, cache_salt), at_once=at_once)
        hold = fetched.hold
        try:
            if hold.missing and self._prefixes.is_enabled:
                await self._bring(fetched, terms, parent)
        except TimeoutError:
            fetched.miss = "slow"
        except BaseException:
            self._prefixes.release(hold)
            raise
        await self._bring_state(fetched, terms)
        if not hold.is_arriving:
            self._count(fetched)
        return fetched

    async def _bring_state(self, fetched: Fetched, terms: StoreTerms) -> None:
        """Of models with state: what a sequence needs besides to begin behind these blocks."""
        if self.states is None:
            return
        try:
            await self.states.bring(fetched.hold, terms)
        except BaseException:
            self._prefixes.release(fetched.hold)
            raise

    async def _bring(self, fetched: Fetched, terms: StoreTerms, parent: Any) -> None:
        hold = fetched.hold
        if not self._cache.is_there:
            fetched.miss = "quiet" if self._cache.is_quiet else "no_cache"
            return
        async with asyncio.timeout(MAX_FETCH_S):
            wanted = await self._choose(fetched, terms, parent)
            if wanted:
                attributes = {tracing.REQUEST_ID: terms.request_id}
                with tracing.span("cache fetch", attributes, parent=parent) as span:
                    lease = self._cache.open_lease(terms)
                    try:
                        await self._read(fetched, lease, wanted)
                    finally:
                        if not hold.is_arriving:
                            await self._cache.release(lease)
                        num_blocks = hold.num_restored + hold.num_arriving
                        span.set_attribute("finback.num_blocks", num_blocks)
                        span.set_attribute("finback.num_by_layers", hold.num_arriving)
                        span.set_attribute("finback.num_from_files", fetched.num_from_files)
                        span.set_attribute("finback.bytes", num_blocks * self._payload_bytes)
                        span.set_attribute("finback.miss", fetched.miss)

    async def _choose(self, fetched: Fetched, terms: StoreTerms, parent: Any) -> list[int]:
        """Which blocks to read: look the missing ones up, and weigh."""
        hold, missing = fetched.hold, fetched.hold.missing
        attributes = {
            tracing.REQUEST_ID: terms.request_id,
            "finback.num_blocks": len(hold.hashes),
            "finback.num_device": hold.num_device,
        }
        with tracing.span("cache lookup", attributes, parent=parent) as span:
            names = [hold.hashes[i] for i in missing]
            class_ = terms.traffic_class
            reply = await self._cache.lookup(names, terms.request_id, traffic_class=class_)
            if reply is None:
                fetched.miss = "failed"
                return []
            num_found = min(reply.num_found, len(missing))
            compute_s = self._engine.row_ms / 1e3 * self._block_size
            count = self._book.choose(num_found, reply.num_host, compute_s)
            span.set_attribute("finback.num_found", num_found)
            span.set_attribute("finback.num_host", reply.num_host)
            span.set_attribute("finback.num_chosen", count)
        fetched.num_found = num_found
        if count < len(missing):
            fetched.miss = "absent" if count == num_found else "not_worth"
        return missing[:count]

    async def _read(self, fetched: Fetched, lease: CacheLease, wanted: list[int]) -> None:
        hold = fetched.hold
        for at in range(0, len(wanted), MAX_READ):
            batch = wanted[at : at + MAX_READ]
            started = monotonic_s()
            reply = await lease.read([hold.hashes[i] for i in batch])
            if reply is None:
                fetched.miss = "failed"
                return
            asked_s = monotonic_s() - started
            fetched.num_from_files += reply.num_from_files
            wanted_now = [Wanted(i, t) for i, t in zip(batch, reply.tickets, strict=False)]
            is_last = at + MAX_READ >= len(wanted)
            if is_last and fetched.at_once and self._may_layer(hold, wanted_now):
                if len(wanted_now) < len(batch):
                    fetched.miss = reply.miss or "absent"
                self._let_arrive(fetched, lease, wanted_now, asked_s)
                return
            miss = await self._copier.copy(hold, wanted_now)
            self._learn(asked_s, monotonic_s() - started, len(wanted_now), reply.num_from_files)
            if not miss and len(wanted_now) < len(batch):
                miss = reply.miss or "absent"
            if miss:
                fetched.miss = miss
                return

    def _may_layer(self, hold: PrefixHold, wanted: list[Wanted]) -> bool:
        """Does it pay, and is all of it in the arena?"""
        return (
            self.by_layers
            and self.states is None
            and self._prefixes.may_layer
            and not hold.is_released
            and not hold.pending
            and len(wanted) >= MIN_ARRIVING
            and self._cache.session.is_connected
            and all(
                one.ticket.kind == SHM and one.ticket.length == self._payload_bytes
                for one in wanted
            )
        )

    def _let_arrive(
        self, fetched: Fetched, lease: CacheLease, wanted: list[Wanted], asked_s: float
    ) -> None:
        """Begin to copy, on a thread; the lease is given back when that is over."""
        hold = fetched.hold
        arrival, incoming = self._prefixes.begin_arrival(
            hold, [(one.index, one.ticket) for one in wanted]
        )
        if len(incoming) < len(wanted):
            fetched.miss = "no_room"
        task = asyncio.create_task(self._arrive(fetched, lease, arrival, incoming, asked_s))
        self._arrivals.add(task)
        task.add_done_callback(self._arrivals.discard)

    async def _arrive(
        self,
        fetched: Fetched,
        lease: CacheLease,
        arrival: Arrival,
        incoming: list[Incoming],
        asked_s: float,
    ) -> None:
        hold, started = fetched.hold, monotonic_s()
        reader = self._cache.session.reader
        error: CorruptData | None = None
        try:
            error = await to_thread.run_sync(
                self._prefixes.copy_layers, arrival, incoming, reader, limiter=self._threads
            )
        finally:
            self._prefixes.settle(hold)
            await self._cache.release(lease)
        if not arrival.is_given_up and error is None:
            all_s = asked_s + monotonic_s() - started
            self._learn(asked_s, all_s, len(incoming), fetched.num_from_files)
        num_good = arrival.num_good
        self._metrics.count("finback.worker.blocks_by_layers", num_good, outcome="good")
        if num_good < len(incoming):
            fetched.miss = "slow" if error is None else error.reason
            lost = len(incoming) - num_good
            self._metrics.count("finback.worker.blocks_by_layers", lost, outcome=fetched.miss)
        if error is not None and error.reason in BAD:
            bad = incoming[num_good]
            await self._cache.report_bad(bad.hash, bad.ticket, error.reason)
        self._count(fetched)

    def _learn(self, asked_s: float, all_s: float, num_blocks: int, num_files: int) -> None:
        """The question's own time is fixed, unless the cache had to read files meanwhile."""
        if not num_blocks:
            return
        if num_files:
            self._book.record("file", all_s / num_blocks)
        else:
            self._book.record("overhead", asked_s)
            self._book.record("host", (all_s - asked_s) / num_blocks)

    def count_device(self, num_tokens: int) -> None:
        """A prompt that needed no fetch was found here, as far as this."""
        if num_tokens:
            num_blocks = num_tokens // self._block_size
            self._metrics.count("finback.worker.prefix_blocks", num_blocks, tier="device")

    def release(self, hold: PrefixHold) -> None:
        """Nobody will queue the prompt."""
        self._prefixes.release(hold)

    def _count(self, fetched: Fetched) -> None:
        hold, count = fetched.hold, self._metrics.count
        num_files = min(fetched.num_from_files, hold.num_restored)
        for tier, number in (
            ("device", hold.num_device),
            ("host", hold.num_restored - num_files),
            ("file", num_files),
        ):
            if number:
                count("finback.worker.prefix_blocks", number, tier=tier)
        num_missed = len(hold.hashes) - hold.num_leading
        if fetched.at_once and hold.arrival is not None:
            num_missed = max(0, len(hold.hashes) - hold.num_device - hold.num_restored)
        elif hold.is_released:
            num_missed = 0
        if num_missed:
            count("finback.worker.prefix_misses", num_missed, cause=fetched.miss or "absent")
