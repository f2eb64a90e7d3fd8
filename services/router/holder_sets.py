"""Sets of holders that many blocks share: numbered bitmasks with counts. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

MAX_SETS: Final = 65_536
"""Different sets of holders; above it a block is said to be held by its newest holder alone."""
_FIRST_COLLECT: Final = 1024


class HolderSets:
    """Number 0 is the empty set. `masks` is for reading: the bitmask of each number.

    `num_dead` blocks have another number, whose holders have all been struck out.
    """

    def __init__(self, max_sets: int = MAX_SETS) -> None:
        self.masks: list[int] = [0]
        self.num_dead = 0
        self.num_blurred = 0  # sets that were not made because there were too many
        self._max_sets = max_sets
        self._refs: list[int] = [0]
        self._by_mask: dict[int, int] = {0: 0}
        self._free: list[int] = []
        self._collect_at = _FIRST_COLLECT

    def __len__(self) -> int:
        return len(self.masks) - len(self._free)

    def number_of(self, mask: int, *, fallback: int) -> int:
        """The number of this set; with too many sets that of `fallback`, a set of one or none."""
        number = self._by_mask.get(mask)
        if number is not None:
            return number
        if mask != fallback and len(self) >= self._max_sets:
            self.num_blurred += 1
            return self.number_of(fallback, fallback=fallback)
        if self._free:
            number = self._free.pop()
            self.masks[number], self._refs[number] = mask, 0
        else:
            number = len(self.masks)
            self.masks.append(mask)
            self._refs.append(0)
        self._by_mask[mask] = number
        return number

    def count(self, steps: Mapping[tuple[int, int], int]) -> None:
        """So many blocks went from one number to another (0: from or to nowhere)."""
        for (old, new), num_blocks in steps.items():
            if old:
                self._refs[old] -= num_blocks
                if not self.masks[old]:
                    self.num_dead -= num_blocks
            if new:
                self._refs[new] += num_blocks

    def strike(self, struck: int) -> None:
        """These holders are in no set any more."""
        self._by_mask = {0: 0}
        free = set(self._free)
        for number in range(1, len(self.masks)):
            if number in free:
                continue
            before = self.masks[number]
            mask = self.masks[number] = before & ~struck
            if before and not mask:
                self.num_dead += self._refs[number]
            self._by_mask.setdefault(mask, number)

    def collect(self) -> bool:
        """Free the numbers that no block has, when there are many; whether that was done."""
        if len(self) < self._collect_at:
            return False
        free = set(self._free)
        for number in range(1, len(self.masks)):
            if not self._refs[number] and number not in free:
                if self._by_mask.get(self.masks[number]) == number:
                    del self._by_mask[self.masks[number]]
                self.masks[number] = 0
                self._free.append(number)
        self._collect_at = max(_FIRST_COLLECT, 2 * len(self))
        return True

    def sizes(self) -> dict[int, int]:
        """Blocks by bit. Cost: sets times holders."""
        sizes: Counter[int] = Counter()
        for mask, refs in zip(self.masks, self._refs, strict=True):
            while mask and refs:
                low = mask & -mask
                mask ^= low
                sizes[low.bit_length() - 1] += refs
        return dict(sizes)
