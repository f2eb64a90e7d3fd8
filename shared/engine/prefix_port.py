"""Cached prefixes in and out of the device pool: held, restored from the host, copied out to it.

Checked on the event loop, copied on the device thread, a few blocks at a time, each time behind the
steps that are queued there: so copies come between two steps and never hold one up for long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

from finback.shared.engine.arrival import Arrival
from finback.shared.engine.layer_copy import Incoming, copy_layers
from finback.shared.engine.prefix_hold import PrefixHold, PrefixHolds
from finback.shared.engine.runner import Runner
from finback.shared.engine.sequence import Sequence, SequenceSpec, TokenIds
from finback.shared.engine.table import SequenceTable
from finback.shared.kv.layout import BlockGeometry
from finback.shared.kv.stored_block import kv_of, write_tokens
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.ticket import Ticket

# What a hold that nobody takes over may last; whoever needs its room takes it earlier.
HOLD_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlock:
    """A full block that was computed here and is now findable: block `index` of a sequence."""

    hash: bytes
    index: int
    spec: SequenceSpec


class PrefixPort:
    """The engine's prefix cache, for whoever brings blocks from elsewhere or keeps them there.

    `on_new_block` hears of each block worth keeping; `on_change` of (hash, is there) of every block.
    Both are called while steps are committed and must be quick.
    """

    def __init__(
        self,
        table: SequenceTable,
        runner: Runner,
        geometry: BlockGeometry,
        call: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        self._table = table
        self._runner = runner
        self._geometry = geometry
        self._call = call
        self.on_new_block: Callable[[NewBlock], None] | None = None
        table.on_registered = self._registered

    @property
    def is_enabled(self) -> bool:
        """Whether blocks are reused at all."""
        return self._table.config.prefix_caching

    @property
    def on_change(self) -> Callable[[bytes, bool], None] | None:
        """Hears (hash, True) of blocks that become findable here, (hash, False) of those that go."""
        return self._table.pool.on_change

    @on_change.setter
    def on_change(self, listener: Callable[[bytes, bool], None] | None) -> None:
        self._table.pool.on_change = listener

    def hashes(self) -> list[bytes]:
        """All blocks that are findable here now."""
        return self._table.pool.hashes()

    def chain(self, token_ids: TokenIds, cache_salt: bytes) -> tuple[bytes, ...]:
        """Hashes of the full blocks of these tokens."""
        return self._table.holds.chain(token_ids, cache_salt)

    def lacks(self, token_ids: TokenIds, cache_salt: bytes) -> bool:
        """Is there a full block before the last of these known tokens that is not here?"""
        size = self._geometry.block_size
        useful = token_ids[: max(0, token_ids.size - 1) // size * size]
        pool = self._table.pool
        return any(pool.find(name) is None for name in self.chain(useful, cache_salt))

    # -- holds

    def hold(self, token_ids: TokenIds, cache_salt: bytes) -> PrefixHold:
        """Keep what the pool has of these known tokens, until `release`, `Engine.add` or `HOLD_S`."""
        if not self.is_enabled:
            return PrefixHold(hashes=(), tokens=(), num_prompt=token_ids.size, is_released=True)
        hold = self._table.holds.hold(token_ids, cache_salt)
        timer = asyncio.get_running_loop().call_later(HOLD_S, self.release, hold)
        hold.on_release = timer.cancel
        return hold

    def catch_up(self, hold: PrefixHold) -> None:
        """Keep what has come into the pool since."""
        self._table.holds.catch_up(hold)

    def release(self, hold: PrefixHold) -> None:
        """Let go; the blocks stay findable until their room is needed."""
        self._table.holds.release(hold)

    async def restore(
        self, hold: PrefixHold, blocks: Iterable[tuple[int, memoryview]]
    ) -> list[bool]:
        """Copy stored blocks (index, payload as in `stored_block`) into the pool, in one go.

        For each, whether block `index` is held now. If not, the pool is nearly full, or the hold was
        given up. ValueError: one of them is another block. Payloads must not change meanwhile.
        """
        datas = [(i, kv_of(data, self._geometry, hold.tokens[i])) for i, data in blocks]
        holds = self._table.holds
        # Whoever decodes may need a block at its next step.
        spare = len(self._table.running) + 1
        rooms = [(i, holds.take_room(hold, i, spare), data) for i, data in datas]
        copies = [(room, data) for _, room, data in rooms if room is not None]
        is_good = False
        try:
            if copies:
                await self._call(partial(self._unpack, copies))
            is_good = True
        finally:
            for index, room, _ in rooms:
                if room is not None:
                    holds.land(hold, index, is_good=is_good)
        return [index in hold.block_ids for index, _ in datas]

    # -- layer by layer

    @property
    def may_layer(self) -> bool:
        """May blocks come layer by layer now? Not while a step that waited would hold others up."""
        table = self._table
        return self._runner.waits_for_layers and not table.running and not table.waiting

    def begin_arrival(
        self, hold: PrefixHold, wanted: Iterable[tuple[int, Ticket]]
    ) -> tuple[Arrival, list[Incoming]]:
        """Room for these blocks, as far as there is some, for `copy_layers`; then `settle`."""
        holds, incoming, indices = self._table.holds, list[Incoming](), list[int]()
        for index, ticket in wanted:
            room = holds.take_room(hold, index, len(self._table.running) + 1)
            if room is None:
                break
            name, tokens = hold.hashes[index], hold.tokens[index]
            one = Incoming(hash=name, ticket=ticket, tokens=tokens, block_id=room)
            incoming.append(one)
            indices.append(index)
        arrival = Arrival(self._geometry.num_layers, len(incoming))
        holds.begin_arrival(hold, indices, arrival)
        return arrival, incoming

    def copy_layers(
        self, arrival: Arrival, incoming: list[Incoming], reader: ArenaReader
    ) -> CorruptData | None:
        """See there; on a thread."""
        return copy_layers(arrival, incoming, reader, self._geometry, self._runner.put_layers)

    def settle(self, hold: PrefixHold) -> None:
        """The arrival is over: what is good can be found now."""
        self._table.holds.settle(hold)

    def _unpack(self, copies: list[tuple[int, memoryview]]) -> None:
        """On the device thread."""
        for block_id, data in copies:
            self._runner.unpack_block(block_id, self._geometry.block_size, data)

    # -- out

    async def copy_out(self, block_hash: bytes, payload: memoryview) -> bool:
        """Write a findable block as it is stored; False if it is not here (any more).

        The device thread writes into `payload` until this returns; cancelled, even after that.
        """
        found = self._table.pool.find(block_hash)
        if found is None:
            return False
        block_id, tokens = found
        write_tokens(payload, self._geometry, tokens)
        size, num_bytes = self._geometry.block_size, self._geometry.block_bytes
        holds: PrefixHolds = self._table.holds
        holds.borrow(block_id)
        try:
            work = partial(self._runner.pack_block, block_id, size, payload[:num_bytes])
            await self._call(work)
        finally:
            holds.give_back(block_id)
        return True

    def _registered(self, sequence: Sequence, index: int) -> None:
        if self.on_new_block is not None:
            block = NewBlock(hash=sequence.hashes[index], index=index, spec=sequence.spec)
            self.on_new_block(block)
