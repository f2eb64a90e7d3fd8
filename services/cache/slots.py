"""The nouns of the arena's bookkeeping."""

from dataclasses import dataclass, field

from finback.shared.lanes.arena_format import BlockKind, BlockLabel

SlotKey = tuple[int, int]  # extent id, index in the extent
BlockName = tuple[str, int, bytes]  # salt, kind, hash


@dataclass(slots=True)
class Lease:
    """Some slots of one process, until `deadline_s` unless renewed.

    `keys`: slots that are the lease's own and go with it. `pins`: kept slots that stay while it
    lasts. `opened_s`: when it was drawn; all that one request uses counts as used then.
    """

    lease_id: str
    owner: str
    owner_epoch: int
    lease_ms: int
    deadline_s: float
    keys: set[SlotKey] = field(default_factory=set)
    pins: set[SlotKey] = field(default_factory=set)
    opened_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Slots by state, and leases."""

    num_free: int
    num_reserved: int
    num_committed: int
    num_quarantined: int
    num_leases: int
    num_kept: int = 0


def name_of(label: BlockLabel) -> BlockName:
    """What a block is found by."""
    return label.salt, label.kind, label.hash


def block_name(salt: str, digest: bytes, kind: BlockKind = BlockKind.BLOCK) -> BlockName:
    """As `name_of`, from the parts."""
    return salt, kind, digest


def size_class(num_bytes: int) -> int:
    """The slot size that serves `num_bytes`: pages, then eight steps a doubling (waste < 1/8)."""
    page = 4096
    step = max(page, 1 << max(0, (num_bytes - 1).bit_length() - 4))
    return -(-num_bytes // step) * step
