"""What workers and routers ask of the store: store, lookup, read, prefetch, bad-block."""

import time
from collections.abc import Sequence
from typing import Final

import anyio

from finback.services.cache.arena import MAX_BLOCK_BYTES, MAX_BLOCKS, check_range
from finback.services.cache.block_names import hashes_of
from finback.services.cache.file_tier import FileTier
from finback.services.cache.forgotten import Forgotten
from finback.services.cache.growth import Growth
from finback.services.cache.index import split_hashes
from finback.services.cache.kept import Now
from finback.services.cache.offers import Offers
from finback.services.cache.promotion import Promotion
from finback.services.cache.renewals import Renewals
from finback.services.cache.retention import KINDS, block_kind
from finback.services.cache.slots import SlotKey, size_class
from finback.services.cache.store import Found, KvStore
from finback.services.cache.tallies import Tallies
from finback.services.cache.uses import LOOKUP, READ, Uses
from finback.services.cache.write_back import WriteBack
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.errors import InvalidRequest
from finback.shared.kv.block_hash import HASH_BYTES
from finback.shared.lanes.arena_format import BlockKind
from finback.shared.lanes.shm import ArenaReader
from finback.shared.telemetry.tracing import annotate
from finback.shared.wire.messages.cache_store import (
    BadBlock,
    LookupReply,
    LookupRequest,
    PrefetchCommand,
    ReadReply,
    ReadRequest,
    StoreReply,
    StoreRequest,
)

LANES: Final = ("shm", "nats")
MAX_WAIT_MS: Final = 60_000
_READERS: Final = 32  # reads that may wait at once


class BlockEndpoints:
    """The store's endpoints for the data path of one cache service."""

    def __init__(self, service: Service, store: KvStore, tier: FileTier, growth: Growth) -> None:
        self._growth = growth
        self._service = service
        self._store = store
        self._tier = tier
        self._metrics = service.metrics
        self.tallies = Tallies(service.metrics)
        self.uses = Uses(service.metrics)
        self.reader = ArenaReader(store.arena.folder)
        self.forgotten = Forgotten()
        self._promotion = Promotion(service, store, tier, self.forgotten)
        self._write_back = WriteBack(service, store, tier, self.reader, self.forgotten)
        self._renewals = Renewals(tier)
        store.on_renewed = self._renewals.note
        self._offers = Offers(service, store.arena, self.found_corrupt)

    async def start(self) -> None:
        """Answer from now on."""
        self._service.spawn(self._write_back.run)
        for verb, request_type, handler, workers in (
            # One worker where order is to be kept.
            ("store", StoreRequest, self._on_store, 1),
            ("bad-block", BadBlock, self._on_bad_block, 1),
            ("lookup", LookupRequest, self._on_lookup, 8),
            ("read", ReadRequest, self._on_read, _READERS),
            ("prefetch", PrefetchCommand, self._on_prefetch, 8),
        ):
            await self._service.add_endpoint(
                verb, request_type, handler, scope="both", workers=workers
            )

    async def stop(self) -> None:
        """Offer nothing more."""
        self._promotion.close()
        await self._offers.stop()
        self.reader.close()

    async def released(self, lease_ids: tuple[str, ...]) -> None:
        """Leases have ended: what was offered under them is offered no more."""
        await self._offers.withdraw(lease_ids)

    @property
    def num_waiting_writes(self) -> int:
        """Blocks that wait to be written to files."""
        return self._write_back.num_waiting

    def committed(self, keys: list[SlotKey]) -> None:
        """These blocks are kept from now on."""
        self._write_back.offer(keys)

    async def tick(self) -> None:
        """Once a second."""
        await self._offers.prune()
        self.measure()
        num_renewed = await self._renewals.flush()
        if num_renewed:
            self._metrics.count("finback.cache.files_renewed", num_renewed)

    def measure(self) -> None:
        """Fill in the gauges, and fetch what was counted."""
        kept = self._store.arena.kept
        for (kind, class_), num_bytes in kept.num_bytes.items():
            labels = {"tier": "host", "kind": kind.name.lower(), "class_": class_.name.lower()}
            self._metrics.gauge("finback.cache.kept_bytes", num_bytes, **labels)
            num_blocks = kept.num_blocks[kind, class_]
            self._metrics.gauge("finback.cache.kept_blocks", num_blocks, **labels)
        self.tallies.move("gone", kept.evicted)
        self.tallies.move("refused", self._store.refused)

    async def _on_store(self, call: Call[StoreRequest]) -> StoreReply:
        started = time.perf_counter()
        await self._grow_for(call.message)
        evicted = self._store.arena.kept.evicted
        before = evicted.total()
        reply = self._store.store(call.message, self._store.clocks.now())
        annotate(
            **{
                "finback.cache.num_slots": len(reply.slots),
                "finback.cache.num_given_up": evicted.total() - before,
            }
        )
        self._metrics.observe("finback.cache.store_duration", time.perf_counter() - started)
        self._metrics.count("finback.cache.slots", len(reply.slots), outcome="stored")
        return reply

    async def _grow_for(self, request: StoreRequest) -> None:
        """Slots for what is new; what is wrong with the request is said by the store."""
        is_sized = 0 < request.payload_bytes <= MAX_BLOCK_BYTES
        if not is_sized or request.kind not in KINDS or len(request.hashes) % HASH_BYTES:
            return
        hashes = split_hashes(request.hashes[: MAX_BLOCKS * HASH_BYTES])
        pool = self._store.arena.book.index.pool(request.salt, block_kind(request.kind))
        num_new = sum(digest not in pool for digest in hashes)
        await self._growth.make_room(size_class(request.payload_bytes), num_new)

    async def _on_lookup(self, call: Call[LookupRequest]) -> LookupReply:
        request = call.message
        hashes = hashes_of(request.salt, request.hashes)
        kind = block_kind(request.kind)
        at = self._store.clocks.now()
        num_found = num_host = self._store.leading_run(request.salt, hashes, kind, at)
        if kind is BlockKind.BLOCK:
            num_found += self._run_in_any_tier(request.salt, hashes[num_host:], at)
            if request.prefetch:
                self._prefetch(request.salt, hashes)
        if kind is BlockKind.BLOCK:
            self._account_lookup(request, hashes, num_host, num_found, at)
        return LookupReply(num_found=num_found, num_host=num_host)

    def _account_lookup(
        self,
        request: LookupRequest,
        hashes: Sequence[bytes],
        num_host: int,
        num_found: int,
        at: Now,
    ) -> None:
        outcomes, why = {"host": num_host, "file": num_found - num_host}, ""
        if num_found < len(hashes):
            why = self._store.why_missing(request.salt, hashes[num_found], BlockKind.BLOCK, at)
            outcomes[why] = len(hashes) - num_found
        self.uses.add(LOOKUP, request.traffic_class, outcomes)
        annotate(
            **{
                "finback.cache.hits_host": num_host,
                "finback.cache.hits_file": num_found - num_host,
                "finback.cache.miss": why,
            }
        )

    def _run_in_any_tier(self, salt: str, hashes: Sequence[bytes], at: Now) -> int:
        for count, digest in enumerate(hashes):
            if not self._tier.holds(salt, digest) and not self._store.is_held(salt, digest, at):
                return count
        return len(hashes)

    async def _on_read(self, call: Call[ReadRequest]) -> ReadReply:
        request = call.message
        if request.lane not in LANES:
            raise InvalidRequest(f"lane must be one of {', '.join(LANES)}", param="lane")
        check_range("wait_ms", request.wait_ms, 0, MAX_WAIT_MS)
        found = self._store.pin_run(request, self._store.clocks.now())
        num_host = len(found.keys)
        if found.miss and request.kind == "block":
            found = await self._wait_for_files(request, found)
        tickets, miss = await self._offers.tickets(found.keys, request.lane, request.lease_id)
        if miss:
            found = Found(found.keys[: len(tickets)], miss)
        num_from_files = max(0, len(found.keys) - num_host)
        self._account(found, num_from_files)
        outcomes = {"host": len(found.keys) - num_from_files, "file": num_from_files}
        if found.miss:
            outcomes[found.miss] = len(request.hashes) // HASH_BYTES - len(found.keys)
        self.uses.add(READ, request.traffic_class, outcomes)
        return ReadReply(tickets=tickets, miss=found.miss, num_from_files=num_from_files)

    async def _wait_for_files(self, request: ReadRequest, found: Found) -> Found:
        """What can be read once blocks have come from the files, or the time is over."""
        hashes = split_hashes(request.hashes)
        with anyio.move_on_after(request.wait_ms / 1000):
            while found.miss:
                at = self._store.clocks.now()
                load = self._promotion.want(request.salt, hashes[len(found.keys) :], at)
                if load is None:
                    return found
                await load.done.wait()
                found = self._store.pin_run(request, self._store.clocks.now(), is_again=True)
                if load.reason and found.miss:
                    return Found(found.keys, load.reason)
            return found
        return Found(found.keys, "slow")

    async def _on_prefetch(self, call: Call[PrefetchCommand]) -> None:
        hashes = hashes_of(call.message.salt, call.message.hashes)
        self._prefetch(call.message.salt, hashes)

    def _prefetch(self, salt: str, hashes: Sequence[bytes]) -> None:
        at = self._store.clocks.now()
        self._store.touch(salt, hashes, at)
        self._promotion.want(salt, hashes, at)

    def found_corrupt(self, key: SlotKey, generation: int, reason: str) -> None:
        """A copy of this slot did not fit its checksum."""
        header = self._store.arena.book.header(key)
        if header.label is not None and header.generation == generation:
            self._drop_corrupt(header.label.salt, header.label.hash, generation, reason)

    def _drop_corrupt(self, salt: str, digest: bytes, generation: int, reason: str) -> None:
        is_dropped = self._store.drop_corrupt(salt, digest, generation)
        self._metrics.count("finback.cache.bad_blocks", reason=reason[:32])
        self._service.log.warning("bad block", reason=reason[:80], is_dropped=is_dropped)

    async def _on_bad_block(self, call: Call[BadBlock]) -> None:
        bad = call.message
        self._drop_corrupt(bad.salt, bad.hash, bad.ticket.generation, bad.reason)

    def _account(self, found: Found, num_from_files: int) -> None:
        num_host = len(found.keys) - num_from_files
        self.tallies.add("hit", "host", num_host)
        self.tallies.add("hit", "file", num_from_files)
        if found.miss:
            self.tallies.add("miss", found.miss)
        annotate(
            **{
                "finback.cache.hits_host": num_host,
                "finback.cache.hits_file": num_from_files,
                "finback.cache.miss": found.miss,
            }
        )
