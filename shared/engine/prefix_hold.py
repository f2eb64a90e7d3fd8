"""Blocks of a prompt that are kept in the pool while more of them are fetched. Pure: ids, no tensor.

A hold refers to the prompt's blocks that are in the pool, and takes room for those that are brought
from elsewhere; these are registered as they land. Holds are only good will: whoever needs room takes
it from the youngest first, and what was held is then found, or not, like any other cached block.
Room that a thread is writing to (an `Arrival`) keeps its reference until that is over.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from finback.shared.engine.arrival import Arrival
from finback.shared.engine.block_pool import BlockPool
from finback.shared.engine.sequence import TokenIds
from finback.shared.errors import InvariantViolated
from finback.shared.kv import block_hash

Pairs = list[tuple[bytes, bytes]]
"""(hash, token bytes) of leading full blocks."""


@dataclass(slots=True, eq=False, kw_only=True)
class PrefixHold:
    """`hashes[i]` and `tokens[i]` (int32 LE) name the full blocks that may serve this prompt.

    Its last token is never among them. `block_ids`: the blocks held, by index, each with one
    reference; `pending`: room whose content is on its way. `num_device`: the leading blocks that were
    in the pool when it was asked. `arrival`, until it is settled: a thread writes to what is pending,
    and a sequence may take these blocks already.
    """

    hashes: tuple[bytes, ...]
    tokens: tuple[bytes, ...]
    num_prompt: int
    cache_salt: bytes = b""
    block_ids: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    num_device: int = 0
    num_restored: int = 0
    is_released: bool = False
    is_forgotten: bool = False
    arrival: Arrival | None = None
    is_settled: bool = False
    on_release: Callable[[], None] | None = None

    @property
    def missing(self) -> list[int]:
        """The blocks that are not in the pool, in order."""
        return [
            index
            for index in range(len(self.hashes))
            if index not in self.block_ids and index not in self.pending
        ]

    @property
    def is_arriving(self) -> bool:
        """Are blocks on their way layer by layer, with no word yet on what came of it?"""
        return self.arrival is not None and not self.is_settled

    @property
    def num_arriving(self) -> int:
        """Blocks that are."""
        return len(self.pending) if self.is_arriving else 0

    @property
    def num_leading(self) -> int:
        """How many leading blocks are held."""
        count = 0
        while count in self.block_ids:
            count += 1
        return count


class PrefixHolds:
    """All holds over one pool."""

    def __init__(self, pool: BlockPool, block_size: int, cache_key: bytes) -> None:
        self._pool = pool
        self._block_size = block_size
        self._cache_key = cache_key
        self._holds: dict[PrefixHold, None] = {}
        # Released ones whose arrival is not over.
        self._leaving: dict[PrefixHold, None] = {}
        self._borrowed: list[int] = []

    def chain(self, token_ids: TokenIds, cache_salt: bytes) -> tuple[bytes, ...]:
        """Hashes of all full blocks of these tokens."""
        size, key = self._block_size, self._cache_key
        root = block_hash.prompt_root(key, cache_salt, size)
        data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        return tuple(block_hash.extend_all(root, data, size, key))

    def hold(self, token_ids: TokenIds, cache_salt: bytes) -> PrefixHold:
        """Refer to what the pool has of this prompt."""
        size = self._block_size
        useful = token_ids[: (token_ids.size - 1) // size * size] if token_ids.size else token_ids
        hold = PrefixHold(
            hashes=self.chain(useful, cache_salt),
            tokens=tuple(
                np.ascontiguousarray(useful[at : at + size], dtype="<i4").tobytes()
                for at in range(0, useful.size, size)
            ),
            num_prompt=int(token_ids.size),
            cache_salt=cache_salt,
        )
        self._holds[hold] = None
        self.catch_up(hold)
        hold.num_device = hold.num_leading
        return hold

    def catch_up(self, hold: PrefixHold) -> None:
        """Refer to further blocks that have come into the pool meanwhile."""
        if hold.is_released:
            return
        for index in hold.missing:
            found = self._pool.match([(hold.hashes[index], hold.tokens[index])])
            self._pool.acquire(found)
            hold.block_ids.update((index, block_id) for block_id in found)

    def take_room(self, hold: PrefixHold, index: int, spare: int) -> int | None:
        """A block for the content of block `index`; None when not more than `spare` are free."""
        if hold.is_released or index in hold.block_ids or index in hold.pending:
            return None
        if self._pool.num_free <= spare:
            return None
        taken = self._pool.allocate(1)
        if taken is None:
            return None
        hold.pending[index] = taken[0]
        return taken[0]

    def land(self, hold: PrefixHold, index: int, *, is_good: bool) -> bool:
        """The content of `index` lies in its room (or could not be had); True if it now serves."""
        block_id = hold.pending.pop(index, None)
        if block_id is None:  # the hold was given up meanwhile
            return False
        name, tokens = hold.hashes[index], hold.tokens[index]
        if is_good and self._pool.register(block_id, name, tokens, hold.cache_salt):
            hold.block_ids[index] = block_id
            hold.num_restored += 1
            return True
        self._pool.release([block_id])
        if is_good:  # somebody computed it while it was on its way
            self.catch_up(hold)
        return index in hold.block_ids

    # -- blocks that come layer by layer

    def begin_arrival(self, hold: PrefixHold, indices: list[int], arrival: Arrival) -> None:
        """A thread begins to write to the room of these blocks, which is pending."""
        if sorted(hold.pending) != sorted(indices):
            raise InvariantViolated("an arrival brings all blocks that are pending, and no others")
        hold.arrival = arrival

    def arriving(self, hold: PrefixHold | None, pairs: Pairs, first: int) -> list[int]:
        """Blocks behind the first `first` of a sequence that are here or on their way, in order."""
        if hold is None or not hold.is_arriving:
            return []
        found = []
        for index, (name, tokens) in enumerate(pairs[first:], start=first):
            block_id = hold.pending.get(index)
            if block_id is None:
                block_id = next(iter(self._pool.match([(name, tokens)])), None)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def settle(self, hold: PrefixHold) -> None:
        """What came of an arrival that is over: good blocks are findable now. Once; else nothing."""
        arrival = hold.arrival
        if arrival is None or hold.is_settled or not arrival.is_over:
            return
        hold.is_settled = True
        for count, index in enumerate(sorted(hold.pending)):
            block_id = hold.pending.pop(index)
            is_good = count < arrival.num_good and not hold.is_forgotten
            name, tokens = hold.hashes[index], hold.tokens[index]
            if is_good and self._pool.register(block_id, name, tokens, hold.cache_salt):
                hold.num_restored += 1
            if is_good and not hold.is_released and self._pool.find(name) == (block_id, tokens):
                hold.block_ids[index] = block_id
            else:
                self._pool.release([block_id])
        self._leaving.pop(hold, None)

    def release(self, hold: PrefixHold) -> None:
        """Let go of everything; what is registered stays findable. Repeating it is harmless.

        Room whose content is on its way may be given to others at once: the device works in order.
        """
        if hold.is_released:
            return
        hold.is_released = True
        del self._holds[hold]
        self._pool.release([hold.block_ids[index] for index in sorted(hold.block_ids)])
        hold.block_ids.clear()
        if hold.is_arriving:
            self._leaving[hold] = None
            self.settle(hold)
        else:
            self._pool.release(list(hold.pending.values()))
            hold.pending.clear()
        if hold.on_release is not None:
            hold.on_release()

    def forget(self, is_forgotten: Callable[[bytes, bytes], bool]) -> None:
        """Release holds with blocks that are to be forgotten: what is on its way does not land."""
        for hold in list(self._holds):
            if any(is_forgotten(name, hold.cache_salt) for name in hold.hashes):
                hold.is_forgotten = True
                self.release(hold)
        for hold in self._leaving:
            if any(is_forgotten(name, hold.cache_salt) for name in hold.hashes):
                hold.is_forgotten = True

    def give_up_one(self) -> bool:
        """Release the youngest hold because somebody needs room; False if there is none."""
        if not self._holds:
            return False
        self.release(next(reversed(self._holds)))
        return True

    def num_to_give_up(self, but: list[int]) -> int:
        """How many blocks would be free if all holds were given up, those in `but` not counted."""
        refs = Counter(self._held(with_arrivals=False))
        kept = set(but)
        return sum(
            count == self._pool.ref_count(block_id)
            for block_id, count in refs.items()
            if block_id not in kept
        )

    # -- single blocks, while they are copied out

    def borrow(self, block_id: int) -> None:
        """Keep one findable block from being written over."""
        self._pool.acquire([block_id])
        self._borrowed.append(block_id)

    def give_back(self, block_id: int) -> None:
        """It is copied."""
        self._borrowed.remove(block_id)
        self._pool.release([block_id])

    # -- the books

    def block_ids(self) -> Iterator[int]:
        """Every reference taken here, for the check of the books."""
        yield from self._held()
        for hold in self._leaving:
            yield from hold.pending.values()
        yield from self._borrowed

    def _held(self, *, with_arrivals: bool = True) -> Iterator[int]:
        for hold in self._holds:
            yield from hold.block_ids.values()
            if with_arrivals or not hold.is_arriving:
                yield from hold.pending.values()

    def __len__(self) -> int:
        return len(self._holds)
