"""Snapshots of state between an engine and the cache of its host, kind `state`.

What an engine keeps at a prompt's or an answer's end is stored as well, behind the steps and without
ever being waited for; when a prompt comes whose blocks are here and whose state is not, the latest
snapshot that spares more than the engine's own is looked for. The payload is the state, and behind it
the token ids of the block that it follows (as `stored_block` has them); these are compared.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.sequence import Sequence, SequenceSpec
from finback.shared.engine.state_book import NewSnapshot
from finback.shared.engine.state_port import StatePort
from finback.shared.engine.write_back import FORGET_S, terms_of
from finback.shared.errors import ServingError
from finback.shared.kv.cache_client import CacheClient, StoreTerms
from finback.shared.kv.forget_scope import ForgetScope
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.select import LaneSet
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.cache import Slot

if TYPE_CHECKING:
    from finback.shared.engine.engine import Engine  # brings torch; the caller built it

KIND: Final = "state"
MAX_QUEUE: Final = 64
"""Snapshots that wait to be stored; the oldest is dropped for a newer one."""
MAX_LOOKUPS: Final = 4
"""Positions that are asked for, from the latest on; each is one question."""
MAX_FETCH_S: Final = 2.0
_TOKEN_BYTES: Final = 4
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    snapshot: NewSnapshot
    spec: SequenceSpec


class StateExchange:
    """One for an engine whose model has state; `run` stores, `bring` fetches."""

    def __init__(
        self, engine: "Engine", cache: CacheClient, lanes: LaneSet, metrics: Metrics
    ) -> None:
        if engine.states is None:
            raise ValueError("the model has no state")
        self._engine = engine
        self._states: StatePort = engine.states
        self._cache = cache
        self._lanes = lanes
        self._metrics = metrics
        self._block_size = engine.cache_spec.block_size
        self._payload_bytes = self._states.payload_bytes + _TOKEN_BYTES * self._block_size
        self._queue: deque[_Waiting] = deque()
        self._news = asyncio.Event()
        self._is_storing = False
        self._num_stores = 0
        self._states.on_snapshot = self._offer
        self._states.on_begin = self._begun

    # -- out

    @property
    def num_waiting(self) -> int:
        """Snapshots that are not stored yet."""
        return len(self._queue) + self._is_storing

    def _offer(self, sequence: Sequence, snapshot: NewSnapshot) -> None:
        if not terms_of(sequence.spec).wants_store:
            return
        if len(self._queue) >= MAX_QUEUE:
            self._queue.popleft()
            self._count("queue_full")
        self._queue.append(_Waiting(snapshot=snapshot, spec=sequence.spec))
        self._news.set()

    async def forget(self, scope: ForgetScope) -> None:
        """As `WriteBack.forget`."""
        kept = [w for w in self._queue if not scope.covers(w.snapshot.hash, w.spec.cache_salt)]
        self._queue = deque(kept)
        number = self._num_stores
        async with asyncio.timeout(FORGET_S):
            while self._is_storing and self._num_stores == number:  # noqa: ASYNC110  # seldom
                await asyncio.sleep(_POLL_S)

    async def run(self) -> None:
        """Store what engines keep; runs until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._queue:
                waiting = self._queue.popleft()
                self._is_storing = True
                self._num_stores += 1
                try:
                    await self._store(waiting)
                finally:
                    self._is_storing = False

    async def _store(self, waiting: _Waiting) -> None:
        if not self._cache.is_there:
            self._count("no_cache")
            return
        snapshot = waiting.snapshot
        async with self._cache.lease(terms_of(waiting.spec)) as lease:
            reply = await lease.store(
                [snapshot.hash],
                first_block=snapshot.index,
                payload_bytes=self._payload_bytes,
                kind=KIND,
            )
            if reply is None or not reply.slots:
                self._count("failed" if reply is None else "known")
                return
            slot = reply.slots[0]
            is_written = await anyio.to_thread.run_sync(self._write, slot, snapshot)
            is_kept = is_written and await lease.commit([(slot, self._payload_bytes)]) is not None
            self._count("stored" if is_kept else "failed")

    def _write(self, slot: Slot, snapshot: NewSnapshot) -> bool:
        try:
            with self._cache.session.writer.view(slot) as view:
                view[: len(snapshot.payload)] = snapshot.payload
                view[len(snapshot.payload) : self._payload_bytes] = snapshot.tokens
        except (OSError, ValueError):  # the arena was made anew, or is gone
            return False
        return True

    # -- in

    def candidates(self, hold: PrefixHold) -> list[int]:
        """Numbers of leading blocks at whose end a snapshot would spare something, the best first."""
        count = hold.num_leading
        pairs = list(zip(hold.hashes[:count], hold.tokens[:count], strict=True))
        start = self._states.best(count * self._block_size, pairs).position
        least = start // self._block_size
        return list(range(count, least, -1))[:MAX_LOOKUPS]

    async def bring(self, hold: PrefixHold, terms: StoreTerms) -> bool:
        """Bring the latest snapshot for these held blocks; True if one came. Fails nobody."""
        wanted = self.candidates(hold)
        if not wanted or not self._cache.is_there:
            return False
        try:
            async with asyncio.timeout(MAX_FETCH_S):
                for count in wanted:
                    if await self._bring_one(hold, count, terms):
                        self._count_fetch("hit")
                        return True
        except (TimeoutError, OSError, ValueError, ServingError) as error:
            self._count_fetch(type(error).__name__.lower())
            return False
        self._count_fetch("absent")
        return False

    async def _bring_one(self, hold: PrefixHold, count: int, terms: StoreTerms) -> bool:
        name, tokens = hold.hashes[count - 1], hold.tokens[count - 1]
        found = await self._cache.lookup([name], terms.request_id, kind=KIND)
        if found is None or not found.num_found:
            return False
        async with self._cache.lease(terms) as lease:
            reply = await lease.read([name], kind=KIND)
            if reply is None or not reply.tickets:
                return False
            payload = await self._fetch(name, reply.tickets[0])
        if payload is None:
            return False
        size = self._states.payload_bytes
        if payload[size:] != tokens:
            await self._cache.report_bad(name, reply.tickets[0], "tokens")
            return False
        return self._states.put(name, tokens, count * self._block_size, bytes(payload[:size]))

    async def _fetch(self, name: bytes, ticket: Ticket) -> memoryview | None:
        try:
            if ticket.length != self._payload_bytes:
                raise CorruptData("length", f"{ticket.length} bytes")
            return await self._lanes.get(ticket)
        except CorruptData as error:
            await self._cache.report_bad(name, ticket, error.reason)
            return None

    def _begun(self, how: str, num_replayed: int) -> None:
        self._metrics.count("finback.worker.states_begun", how=how)
        if num_replayed:
            self._metrics.count("finback.worker.replayed_tokens", num_replayed)

    def _count(self, outcome: str) -> None:
        self._metrics.count("finback.worker.states_kept", outcome=outcome)

    def _count_fetch(self, outcome: str) -> None:
        self._metrics.count("finback.worker.states_fetched", outcome=outcome)
