"""The cache service: owns the host arena that KV blocks are handed over through."""

from finback.shared.wire.codec import message


@message("cache.ArenaRequest/1")
class ArenaRequest:
    """Asked on `cache.arena`: where the arena of this host lies."""


@message("cache.ArenaReply/1")
class ArenaReply:
    """`path` is the arena folder; `nonce` must be found in its `probe` file to use lane `shm`."""

    path: str
    nonce: str
    instance: str
    epoch: int


@message("cache.ReserveRequest/1")
class ReserveRequest:
    """Asked on `cache.reserve`: room for blocks of `block_bytes` each, under a lease.

    `lease_id` (32 hex digits) is drawn by the asker, so that asking again is harmless and a lease
    whose reply was lost can still be released; empty: the cache draws it.
    """

    request_id: str
    owner: str
    owner_epoch: int
    num_blocks: int
    block_bytes: int
    lease_ms: int = 10_000
    lease_id: str = ""


@message("cache.Slot/1")
class Slot:
    """One reserved block: a file below the arena folder, where its payload lies, its generation."""

    slot_id: int
    location: str
    offset: int
    length: int
    generation: int


@message("cache.ReserveReply/1")
class ReserveReply:
    """The reserved slots, or fewer when the arena is full (then the rest goes another way)."""

    slots: tuple[Slot, ...]
    lease_id: str


@message("cache.CommitRequest/1")
class CommitRequest:
    """Asked on `cache.commit`: these slots are written. `checksums[i]` belongs to `slot_ids[i]`.

    `lengths[i]` is how much of the slot was written; empty: each slot in full.
    """

    lease_id: str
    slot_ids: tuple[int, ...]
    checksums: tuple[bytes, ...]
    lengths: tuple[int, ...] = ()


@message("cache.LeaseRequest/1")
class LeaseRequest:
    """Asked on `cache.renew` (every third of the lease) and on `cache.release`."""

    lease_ids: tuple[str, ...]


@message("cache.LeaseReply/1")
class LeaseReply:
    """Leases that are still (or were) held; the others have expired."""

    held: tuple[str, ...]
