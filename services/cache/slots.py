"""The nouns of the arena's bookkeeping."""

from dataclasses import dataclass, field

SlotKey = tuple[int, int]  # extent id, index in the extent


@dataclass(slots=True)
class Lease:
    """Some slots of one writer, until `deadline_s` unless renewed."""

    lease_id: str
    owner: str
    owner_epoch: int
    lease_ms: int
    deadline_s: float
    keys: set[SlotKey] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Slots by state, and leases."""

    num_free: int
    num_reserved: int
    num_committed: int
    num_quarantined: int
    num_leases: int


def size_class(num_bytes: int) -> int:
    """The slot size that serves `num_bytes`: pages, then eight steps a doubling (waste < 1/8)."""
    page = 4096
    step = max(page, 1 << max(0, (num_bytes - 1).bit_length() - 4))
    return -(-num_bytes // step) * step
