"""Which instance holds which prompt blocks, guessed from where this router sent them. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

HASH_BYTES: Final = 32
_HOLDERS: Final = 4  # of one block that are remembered


def split_hashes(joined: bytes) -> list[bytes]:
    """The chained block hashes of a prompt; the length must be a multiple of 32."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes must be a multiple of {HASH_BYTES} bytes")
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


class PrefixBook:
    """The last `capacity` blocks placed, least recently used first out.

    A chained hash names the whole prefix, so a block that is known implies those before it, unless
    they have been forgotten.
    """

    def __init__(self, capacity: int = 32_768) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, hashes: Sequence[bytes], instances: Iterable[str]) -> None:
        """These instances now hold (or will soon hold) these blocks."""
        new = tuple(dict.fromkeys(instances))
        # Backwards, so that the start of a prompt, which most others share, is forgotten last.
        for block_hash in reversed(hashes):
            old = self._holders.pop(block_hash, ())
            kept = tuple(name for name in old if name not in new)
            self._holders[block_hash] = (new + kept)[:_HOLDERS]
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def hits(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Per instance, how many leading blocks it is thought to hold (those with at least one)."""
        found: dict[str, int] = {}
        still: set[str] | None = None
        for depth, block_hash in enumerate(hashes, 1):
            holders = set(self._holders.get(block_hash, ()))
            still = holders if still is None else still & holders
            if not still:
                break
            found.update(dict.fromkeys(still, depth))
        return found

    def forget(self, instance: str) -> None:
        """An instance is gone, and its blocks with it."""
        for block_hash, holders in tuple(self._holders.items()):
            if instance in holders:
                kept = tuple(name for name in holders if name != instance)
                if kept:
                    self._holders[block_hash] = kept
                else:
                    del self._holders[block_hash]
