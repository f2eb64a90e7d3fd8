"""Snapshots of state that are kept for a while: a bounded pool in memory, with an eviction of its own.

Blocks are kept for days and state for minutes, so the two are never evicted together. A snapshot at P
is kept under the chained hash of the block that ends at P (the salt is the owner's: one pool serves one
model, mode and layout). Pure: the time is an argument.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from finback.shared.errors import InvariantViolated

STATE_LIFE_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`tokens`: those of the block that ends where the state belongs, compared on a hit."""

    tokens: bytes
    payload: bytes
    expires_s: float


class SnapshotPool:
    """At most `max_bytes` of payloads; each lives `life_s` from when it was last put or taken."""

    def __init__(self, max_bytes: int, life_s: float = STATE_LIFE_S) -> None:
        self._max_bytes = max_bytes
        self._life_s = life_s
        # In the order of use, which is the order of expiry too.
        self._by_hash: OrderedDict[bytes, Snapshot] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evicted = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def put(self, block_hash: bytes, tokens: bytes, payload: bytes, now_s: float) -> bool:
        """Keep a snapshot, the least recently used ones give way; False if it alone is too large."""
        self.expire(now_s)
        self._drop(block_hash)
        if len(payload) > self._max_bytes:
            return False
        while self.num_bytes + len(payload) > self._max_bytes:
            self._drop(next(iter(self._by_hash)))
            self.num_evicted += 1
        self._by_hash[block_hash] = Snapshot(tokens, payload, now_s + self._life_s)
        self.num_bytes += len(payload)
        return True

    def indexes(self, blocks: Sequence[tuple[bytes, bytes]], now_s: float) -> list[int]:
        """At the ends of which of these blocks, pairs (chained hash, tokens), a snapshot lies."""
        self.expire(now_s)
        return [
            index
            for index, (block_hash, tokens) in enumerate(blocks)
            if (found := self._by_hash.get(block_hash)) is not None and found.tokens == tokens
        ]

    def take(self, block_hash: bytes, now_s: float) -> bytes | None:
        """A copy for a sequence to begin with; the snapshot stays, and lives on."""
        self.expire(now_s)
        found = self._by_hash.get(block_hash)
        if found is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._by_hash[block_hash] = Snapshot(found.tokens, found.payload, now_s + self._life_s)
        self._by_hash.move_to_end(block_hash)
        return found.payload

    def peek(self, block_hash: bytes) -> bytes | None:
        """The payload, not counted as a use."""
        found = self._by_hash.get(block_hash)
        return None if found is None else found.payload

    def expire(self, now_s: float) -> None:
        """Drop what has outlived its time."""
        while self._by_hash:
            block_hash, oldest = next(iter(self._by_hash.items()))
            if oldest.expires_s > now_s:
                return
            self._drop(block_hash)
            self.num_expired += 1

    def clear(self) -> None:
        """Drop everything."""
        self._by_hash.clear()
        self.num_bytes = 0

    def discard(self, hashes: Iterable[bytes]) -> None:
        """Drop those at the ends of these blocks."""
        for block_hash in hashes:
            self._drop(block_hash)

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` if the books do not add up."""
        total = sum(len(snapshot.payload) for snapshot in self._by_hash.values())
        if total != self.num_bytes or total > self._max_bytes:
            raise InvariantViolated(f"state snapshots hold {total} bytes, not {self.num_bytes}")
        times = [snapshot.expires_s for snapshot in self._by_hash.values()]
        if times != sorted(times):
            raise InvariantViolated("state snapshots are not in the order of their use")

    def _drop(self, block_hash: bytes) -> None:
        found = self._by_hash.pop(block_hash, None)
        if found is not None:
            self.num_bytes -= len(found.payload)
