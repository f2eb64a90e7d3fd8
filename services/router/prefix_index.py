"""Which KV blocks each instance holds, in which tier: a million blocks in about 100 MB. Pure.

A block's key is 60 bits of its chained hash: keyed hashes cannot be steered, so among n blocks two
meet with probability n^2 / 2^61, and then a request only goes to a worse place. The value is the
number of a *set of holders*, a bitmask that most blocks share with many others. So an instance that
goes is struck from the few sets, not from the million blocks; blocks that nobody holds any more are
swept out bit by bit later. Keys lie in 256 dictionaries, so that none takes long to grow or sweep.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from finback.services.router.holder_sets import HolderSets

HASH_BYTES: Final = 32
_KEY_BITS: Final = np.uint64(2**60 - 1)
_SHARDS: Final = 256

Holder = tuple[str, str, str]
"""(instance, salt, tier)."""
Segments = list[tuple[int, int]]
"""Runs along a prompt: (bitmask of holders, how many blocks)."""


def keys_of(joined: bytes) -> list[int]:
    """The keys of joined hashes; raises `ValueError` for a length that is no multiple of 32."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes must be a multiple of {HASH_BYTES} bytes")
    words = np.frombuffer(joined, dtype="<u8").reshape(-1, HASH_BYTES // 8)[:, 0]
    keys: list[int] = (words & _KEY_BITS).tolist()
    return keys


class PrefixIndex:
    """Block key -> holders. `version` changes with the meaning of bits and sets."""

    def __init__(self, max_blocks: int = 2**22) -> None:
        self.version = 0
        self.num_refused = 0  # blocks that found no room
        self._max_blocks = max_blocks
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._num_blocks = 0
        self._sets = HolderSets()
        self._bits: dict[tuple[int, str, str, str], int] = {}  # (view, instance, salt, tier)
        self._holders: dict[int, Holder] = {}  # of active views, by bit
        self._used_bits = 0
        self._next_view = 0
        self._next_shard = 0

    def __len__(self) -> int:
        """Blocks that are listed, those that wait to be swept included."""
        return self._num_blocks

    @property
    def num_sets(self) -> int:
        """Different sets of holders."""
        return len(self._sets)

    @property
    def needs_sweep(self) -> bool:
        """Whether there are blocks that nobody holds."""
        return self._sets.num_dead > 0

    def holders(self) -> dict[int, Holder]:
        """Bit -> whose it is; only these count."""
        return self._holders

    def open_view(self, instance: str) -> "IndexView":
        """An empty view of an instance; what is put in counts from its `activate` on."""
        self._next_view += 1
        return IndexView(self, self._next_view, instance)

    def segments(self, keys: Sequence[int]) -> Segments:
        """Holders along the chain, up to the first block that nobody holds."""
        shards, masks = self._shards, self._sets.masks
        found: Segments = []
        last, start, at = -1, 0, -1
        for at, key in enumerate(keys):  # `at` is used behind the loop
            number = shards[key & 255].get(key, -2)
            if number != last:
                if at > start:
                    found.append((masks[last], at - start))
                if number < 0:
                    return found
                last, start = number, at
        if at >= start:
            found.append((masks[last], at + 1 - start))
        return found

    def num_held(self) -> dict[Holder, int]:
        """Blocks by holder. Cost: sets times holders."""
        sizes = self._sets.sizes().items()
        return {self._holders[bit]: size for bit, size in sizes if bit in self._holders}

    def sweep(self) -> None:
        """Strike out the blocks of one of the 256 parts that nobody holds."""
        shard = self._shards[self._next_shard]
        self._next_shard = (self._next_shard + 1) % _SHARDS
        masks = self._sets.masks
        gone = [key for key, number in shard.items() if not masks[number]]
        self._sets.count(Counter((shard.pop(key), 0) for key in gone))
        self._num_blocks -= len(gone)

    # -- for views

    def bit_of(self, view: int, instance: str, salt: str, tier: str) -> int:
        """The bit of a holder, taken when it is first needed."""
        key = (view, instance, salt, tier)
        bit = self._bits.get(key)
        if bit is None:
            bit = (~self._used_bits & (self._used_bits + 1)).bit_length() - 1
            self._used_bits |= 1 << bit
            self._bits[key] = bit
        return bit

    def activate(self, view: int) -> None:
        """Let a view count."""
        for (owner, *holder), bit in self._bits.items():
            if owner == view:
                self._holders[bit] = (holder[0], holder[1], holder[2])
        self.version += 1

    def name_holder(self, bit: int, holder: Holder) -> None:
        """A bit of an active view."""
        if bit not in self._holders:
            self._holders[bit] = holder
            self.version += 1

    def drop(self, view: int, *, keep_bits: bool = False) -> None:
        """Strike a view from all sets."""
        struck = 0
        for key, bit in tuple(self._bits.items()):
            if key[0] == view:
                struck |= 1 << bit
                if not keep_bits:
                    del self._bits[key]
                    self._holders.pop(bit, None)
                    self._used_bits &= ~(1 << bit)
        if struck:
            self._sets.strike(struck)
            self.version += 1

    def put(self, bit: int, keys: Sequence[int]) -> None:
        """The holder has these blocks."""
        self._collect()
        shards, sets, mine = self._shards, self._sets, 1 << bit
        moves: dict[int, int] = {}
        steps: Counter[tuple[int, int]] = Counter()
        for key in keys:
            shard = shards[key & 255]
            old = shard.get(key, 0)
            new = moves.get(old)
            if new is None:
                new = moves[old] = sets.number_of(sets.masks[old] | mine, fallback=mine)
            if new == old:
                continue
            if not old:
                if self._num_blocks >= self._max_blocks:
                    self.num_refused += 1
                    continue
                self._num_blocks += 1
            shard[key] = new
            steps[old, new] += 1
        sets.count(steps)

    def take(self, bit: int, keys: Sequence[int]) -> None:
        """The holder does not have these blocks any more."""
        self._collect()
        shards, sets, others = self._shards, self._sets, ~(1 << bit)
        moves: dict[int, int] = {}
        steps: Counter[tuple[int, int]] = Counter()
        for key in keys:
            shard = shards[key & 255]
            old = shard.get(key)
            if old is None:
                continue
            new = moves.get(old)
            if new is None:
                new = moves[old] = sets.number_of(sets.masks[old] & others, fallback=0)
            if sets.masks[new]:
                if new == old:
                    continue
                shard[key] = new
            else:
                del shard[key]
                self._num_blocks -= 1
                new = 0
            steps[old, new] += 1
        sets.count(steps)

    def _collect(self) -> None:
        if self._sets.collect():
            self.version += 1


class IndexView:
    """One instance's blocks in one life; see `shared/kv/kv_follower.py`."""

    def __init__(self, index: PrefixIndex, number: int, instance: str) -> None:
        self._index = index
        self._number = number
        self._instance = instance
        self._is_active = False

    def store(self, salt: str, tier: str, hashes: bytes) -> None:
        self._index.put(self._bit(salt, tier), keys_of(hashes))

    def remove(self, salt: str, tier: str, hashes: bytes) -> None:
        self._index.take(self._bit(salt, tier), keys_of(hashes))

    def clear(self) -> None:
        self._index.drop(self._number, keep_bits=True)

    def activate(self) -> None:
        self._is_active = True
        self._index.activate(self._number)

    def drop(self) -> None:
        self._index.drop(self._number)

    def _bit(self, salt: str, tier: str) -> int:
        bit = self._index.bit_of(self._number, self._instance, salt, tier)
        if self._is_active:
            self._index.name_holder(bit, (self._instance, salt, tier))
        return bit
