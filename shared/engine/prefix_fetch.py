"""Brings cached blocks of a prompt into the device pool before the prompt is queued.

What the pool has is held; of what it lacks, the cache's leading run is read, as far as that is quicker
than to compute it. Blocks are copied off the event loop, a few at a time, and go into the pool between
steps. Whatever goes wrong ends the run there: the rest is computed.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from finback.shared.clock import monotonic_s
from finback.shared.engine.block_copies import BlockCopier, Wanted
from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.sequence import TokenIds
from finback.shared.engine.state_exchange import StateExchange
from finback.shared.kv.cache_client import MAX_READ, CacheClient, CacheLease, StoreTerms
from finback.shared.kv.fetch_policy import RateBook
from finback.shared.kv.stored_block import geometry_of, payload_bytes
from finback.shared.lanes.select import LaneSet
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from finback.shared.engine.engine import Engine  # brings torch; the caller built it

MAX_FETCH_S: Final = 5.0
"""A fetch that is not over by then is cut short."""


@dataclass(slots=True, kw_only=True)
class Fetched:
    """A hold on a prompt's prefix, and how it came about. `miss`: why the run ended, if it did."""

    hold: PrefixHold
    num_found: int = 0
    num_from_files: int = 0
    miss: str = ""


class PrefixFetcher:
    """One for an engine; bounds what all its requests have in flight."""

    def __init__(
        self, engine: "Engine", cache: CacheClient, lanes: LaneSet, metrics: Metrics
    ) -> None:
        self._engine = engine
        self._prefixes = engine.prefixes
        self._cache = cache
        self._metrics = metrics
        self._block_size = engine.cache_spec.block_size
        self._payload_bytes = payload_bytes(geometry_of(engine.cache_spec))
        self._copier = BlockCopier(engine.prefixes, cache, lanes, self._payload_bytes)
        self._book = RateBook()
        self.states: StateExchange | None = None

    def may_help(self, token_ids: TokenIds, cache_salt: bytes) -> bool:
        """Could a fetch bring anything: is there a cache, and does the pool lack a block?"""
        if not self._cache.is_there or not self._prefixes.is_enabled:
            return False
        # Whether state is here is only known once it is known which blocks are.
        return self.states is not None or self._prefixes.lacks(token_ids, cache_salt)

    async def fetch(
        self, token_ids: TokenIds, cache_salt: bytes, terms: StoreTerms, parent: Any = None
    ) -> Fetched:
        """Hold and bring what there is of these known tokens. The caller owns the hold.

        Raises nothing but what ends the caller (cancellation): then nothing is held.
        """
        fetched = Fetched(hold=self._prefixes.hold(token_ids, cache_salt))
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
                    try:
                        async with self._cache.lease(terms) as lease:
                            await self._read(fetched, lease, wanted)
                    finally:
                        span.set_attribute("finback.num_blocks", hold.num_restored)
                        span.set_attribute("finback.num_from_files", fetched.num_from_files)
                        span.set_attribute("finback.bytes", hold.num_restored * self._payload_bytes)
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
            miss = await self._copier.copy(hold, wanted_now)
            self._learn(asked_s, monotonic_s() - started, len(wanted_now), reply.num_from_files)
            if not miss and len(wanted_now) < len(batch):
                miss = reply.miss or "absent"
            if miss:
                fetched.miss = miss
                return

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
        if num_missed and not hold.is_released:
            count("finback.worker.prefix_misses", num_missed, cause=fetched.miss or "absent")
