"""How far each worker's caches reach into a prompt: leading blocks by tier. Pure.

A worker can use what its own device pool holds, what the memory of its host's cache holds, and that
cache's files, of its own kind (`salt`) only. Blocks of the middle may have been evicted, in one
tier or all, so the run is counted over all blocks and never by bisection; runs of blocks with the
same holders are taken at once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from finback.services.router.fleet import Fleet
from finback.services.router.policy import Reach
from finback.services.router.prefix_index import Holder, PrefixIndex, Segments

TIERS: Final = ("device", "host", "file")
_MAX_KNOWN: Final = 8_192
Bits = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAt:
    """A cache instance and the host whose workers can read from it."""

    instance: str
    host: str


class Reaches:
    """Turns holders along a prompt into rows of a fleet; made anew when either changes."""

    def __init__(
        self, fleet: Fleet, caches: Iterable[CacheAt], holders: Mapping[int, Holder]
    ) -> None:
        self._size = len(fleet)
        self._row_of = {(w.instance, w.epoch): row for row, w in enumerate(fleet.workers)}
        workers: dict[tuple[str, str], int] = {}  # (instance, salt) -> bit of its row
        at_host: dict[tuple[str, str], int] = {}  # (host, salt) -> bits of rows
        for row, worker in enumerate(fleet.workers):
            workers[worker.instance, worker.salt] = 1 << row
            key = (worker.host, worker.salt)
            at_host[key] = at_host.get(key, 0) | 1 << row
        host_of = {cache.instance: cache.host for cache in caches}
        # Per bit of a holder: (bits of the rows that it helps, tier).
        self._helps: dict[int, tuple[int, int]] = {}
        for bit, (instance, salt, tier) in holders.items():
            rows = workers.get((instance, salt), 0)
            if tier != "device":
                rows = at_host.get((host_of.get(instance, ""), salt), 0)
            if rows and tier in TIERS:
                self._helps[bit] = (rows, TIERS.index(tier))
        self._known: dict[int, Bits] = {}

    def reach(self, segments: Segments, notes: Mapping[tuple[str, int], int]) -> Reach:
        """Per worker and tier; what was only placed there lately counts as on the device."""
        known, columns, still = self._known, None, None
        for mask, count in segments:
            helped = known.get(mask)
            if helped is None:
                helped = self._helped(mask)
            # A run ends for good where a segment does not help.
            still = helped if still is None else still & helped
            run = still * count
            columns = run if columns is None else np.add(columns, run, out=columns)
        if columns is None:
            columns = np.zeros((3, self._size), dtype=np.int32)
        for holder, depth in notes.items():
            row = self._row_of.get(holder)
            if row is not None:
                column = columns[:, row]
                np.maximum(column, depth, out=column)
        return Reach(columns)

    def _helped(self, mask: int) -> Bits:
        """1 for what a set of holders helps: by device, also by host, also by files [3, num_workers]."""
        tiers, rest = [0, 0, 0], mask
        while rest:
            low = rest & -rest
            rest ^= low
            rows, tier = self._helps.get(low.bit_length() - 1, (0, 0))
            tiers[tier] |= rows
        tiers[1] |= tiers[0]
        tiers[2] |= tiers[1]
        width = -(-self._size // 8)
        packed = b"".join(bits.to_bytes(width, "little") for bits in tiers)
        flags = np.unpackbits(np.frombuffer(packed, dtype=np.uint8), bitorder="little")
        helped = flags.reshape(3, 8 * width)[:, : self._size].astype(np.int32)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[mask] = helped
        return helped


class ReachBook:
    """Keeps the `Reaches` of each fleet until the index or the caches mean something else."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._caches: tuple[CacheAt, ...] = ()
        self._version = -1
        self._made: dict[int, tuple[Fleet, Reaches]] = {}

    def set_caches(self, caches: Sequence[CacheAt]) -> None:
        """Who reads from where has changed."""
        self._caches = tuple(caches)
        self._made.clear()

    def of(self, fleet: Fleet) -> Reaches:
        """The translation for this fleet."""
        if self._version != self._index.version or len(self._made) > 64:
            self._made.clear()
            self._version = self._index.version
        found = self._made.get(id(fleet))
        if found is None or found[0] is not fleet:
            made = Reaches(fleet, self._caches, self._index.holders())
            found = self._made[id(fleet)] = (fleet, made)
        return found[1]
