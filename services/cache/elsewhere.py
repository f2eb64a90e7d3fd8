"""What other caches of the cluster hold, so that a block need not be stored twice."""

from collections import Counter
from typing import Final

from finback.shared.kv.block_hash import HASH_BYTES

# Blocks remembered over all other caches, some 150 bytes each; what is more counts as not there.
MAX_BLOCKS: Final = 200_000
_TIERS: Final = frozenset({"host", "file"})


class Elsewhere:
    """Blocks of other caches, in views that a `KvSubscriber` fills."""

    def __init__(self, own_instance: str) -> None:
        self._own = own_instance
        self._holders: Counter[tuple[str, bytes]] = Counter()

    def holds(self, salt: str, digest: bytes) -> bool:
        """Whether another cache has the block."""
        return (salt, digest) in self._holders

    def open_view(self, instance: str) -> "ElsewhereView":
        """A view of one instance; that of the own one stays empty."""
        return ElsewhereView(self._holders, is_other=instance != self._own)


class ElsewhereView:
    """What one other instance holds; a `BlockView`."""

    def __init__(self, holders: Counter[tuple[str, bytes]], *, is_other: bool) -> None:
        self._holders = holders
        self._is_other = is_other
        self._is_active = False
        self._blocks: set[tuple[str, str, bytes]] = set()  # salt, tier, hash

    def store(self, salt: str, tier: str, hashes: bytes) -> None:
        """Take in blocks of memory and files."""
        if not self._is_other or tier not in _TIERS:
            return
        for at in range(0, len(hashes), HASH_BYTES):
            block = (salt, tier, hashes[at : at + HASH_BYTES])
            if block not in self._blocks and len(self._holders) < MAX_BLOCKS:
                self._blocks.add(block)
                self._count(block, 1)

    def remove(self, salt: str, tier: str, hashes: bytes) -> None:
        """Take out blocks."""
        for at in range(0, len(hashes), HASH_BYTES):
            block = (salt, tier, hashes[at : at + HASH_BYTES])
            if block in self._blocks:
                self._blocks.remove(block)
                self._count(block, -1)

    def clear(self) -> None:
        """It holds nothing."""
        for block in self._blocks:
            self._count(block, -1)
        self._blocks.clear()

    def activate(self) -> None:
        """Count from now on."""
        self._is_active = True
        for block in self._blocks:
            self._count(block, 1)

    def drop(self) -> None:
        """Count no more."""
        self.clear()
        self._is_active = False

    def _count(self, block: tuple[str, str, bytes], sign: int) -> None:
        if not self._is_active:
            return
        name = (block[0], block[2])
        self._holders[name] += sign
        if not self._holders[name]:
            del self._holders[name]
