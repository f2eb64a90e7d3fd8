"""What a recovery did, in figures for the log and names for whoever listens."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from finback.services.cache.segments.record import BlockRecord, Entry


@dataclass(slots=True)
class Recovered:
    """What a recovery did."""

    num_added: int = 0
    num_torn: int = 0
    num_lost: int = 0  # rows whose bytes are gone
    num_segments: int = 0
    ignored: dict[str, str] = field(default_factory=dict)  # file -> why
    lost: list[Entry] = field(default_factory=list)
    found: list[BlockRecord] = field(default_factory=list)  # of other writers

    def add(self, other: "Recovered") -> None:
        """Count another folder in."""
        self.num_added += other.num_added
        self.num_torn += other.num_torn
        self.num_lost += other.num_lost
        self.num_segments += other.num_segments
        self.ignored |= other.ignored
        self.lost += other.lost
        self.found += other.found


def by_salt(records: Iterable[BlockRecord]) -> dict[str, list[bytes]]:
    """Hashes of records by their salt."""
    found: dict[str, list[bytes]] = {}
    for record in records:
        found.setdefault(record.salt, []).append(record.hash)
    return found


def describe(done: Iterable[Recovered]) -> dict[str, int]:
    """The figures of a log line."""
    parts = list(done)
    return {
        "num_blocks": sum(part.num_added for part in parts),
        "num_torn": sum(part.num_torn for part in parts),
        "num_lost": sum(part.num_lost for part in parts),
        "num_segments": sum(part.num_segments for part in parts),
    }
