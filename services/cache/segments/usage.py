"""How much is held for whom, counted as blocks come and go."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Part = Literal["salt", "tenant", "traffic_class"]


class Share(NamedTuple):
    """Whom blocks are counted for."""

    salt: str
    tenant: str
    traffic_class: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Blocks, and the bytes that they take in the files (headers and padding included)."""

    num_blocks: int = 0
    num_bytes: int = 0


class UsageBook:
    """Usage by salt, tenant and class."""

    def __init__(self) -> None:
        self._blocks: Counter[Share] = Counter()
        self._bytes: Counter[Share] = Counter()

    def add(self, share: Share, num_bytes: int, num_blocks: int = 1) -> None:
        """Count blocks in."""
        self._blocks[share] += num_blocks
        self._bytes[share] += num_bytes

    def remove(self, share: Share, num_bytes: int) -> None:
        """Count a block out."""
        self._blocks[share] -= 1
        self._bytes[share] -= num_bytes
        if not self._blocks[share]:
            del self._blocks[share], self._bytes[share]

    def shares(self) -> Iterator[tuple[Share, Usage]]:
        """All that is held."""
        for share, num_blocks in self._blocks.items():
            yield share, Usage(num_blocks=num_blocks, num_bytes=self._bytes[share])

    def by(self, part: Part) -> dict[str, Usage]:
        """Summed up by one part of the share."""
        sums: dict[str, Usage] = {}
        for share, usage in self.shares():
            name = getattr(share, part)
            before = sums.get(name, Usage())
            sums[name] = Usage(
                num_blocks=before.num_blocks + usage.num_blocks,
                num_bytes=before.num_bytes + usage.num_bytes,
            )
        return sums

    def total(self) -> Usage:
        """Everything."""
        return Usage(num_blocks=self._blocks.total(), num_bytes=self._bytes.total())
