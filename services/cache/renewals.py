"""Blocks that were read in memory have their time in files begin anew, too: told in batches.

Memory writes a use down about once a minute and block; only such uses are passed on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from finback.services.cache.file_tier import FileTier

if TYPE_CHECKING:
    from finback.services.cache.segments.store import SegmentStore

MAX_WAITING: Final = 4096  # names; what is more waits for its next use


class Renewals:
    """Names by salt until the next `flush`."""

    def __init__(self, tier: FileTier) -> None:
        self._tier = tier
        self._names: dict[str, list[bytes]] = {}
        self._num_names = 0

    def note(self, salt: str, digest: bytes) -> None:
        """The block was used now."""
        if self._num_names < MAX_WAITING and self._tier.holds(salt, digest):
            self._names.setdefault(salt, []).append(digest)
            self._num_names += 1

    async def flush(self) -> int:
        """Tell the files; returns of how many blocks. What fails is lost: a later use tells again."""
        names, self._names, self._num_names = self._names, {}, 0
        for salt, hashes in names.items():
            await self._tier.call(_Touch(salt, hashes))
        return sum(map(len, names.values()))


class _Touch:
    """One call of `touch`, with its arguments."""

    def __init__(self, salt: str, hashes: Sequence[bytes]) -> None:
        self._salt = salt
        self._hashes = hashes

    def __call__(self, store: "SegmentStore") -> None:
        store.touch(self._salt, self._hashes)
