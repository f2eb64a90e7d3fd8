"""The cache service as a store: blocks that are kept under their hash, and found again by it.

The payload of a stored block is its KV in the host layout, and behind it the block's token ids
(int32 LE): a reader checks length, checksum and generation on its copy, and compares the tokens.
Hashes are 32 bytes each and travel joined; `salt` is the `CacheSpec.salt` whose pool they fit.
"""

from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.codec import message
from finback.shared.wire.messages.cache import Slot


@message("cache.StoreRequest/1")
class StoreRequest:
    """Asked on `cache.<instance>.store`: slots for those of these blocks that are worth keeping.

    The slots are written and committed (`cache.CommitRequest`) like reserved ones; committed, they
    are found by their hash and outlive the lease. `kind` is `block` or `state` (state slots live in
    memory only). `first_block` is the index of the first hash in its prompt, `prompt_blocks` the
    number of full blocks in all of it, as far as known (0: what is asked for is the end).
    `retention_s` None: that of the traffic class. `attempt` and `owner_epoch` fence a writer that
    was replaced.
    """

    request_id: str
    owner: str
    owner_epoch: int
    salt: str
    hashes: bytes
    payload_bytes: int
    first_block: int = 0
    kind: str = "block"
    tenant: str = ""
    traffic_class: str = "chat"
    retention_s: float | None = None
    lease_ms: int = 10_000
    lease_id: str = ""
    attempt: int = 1
    prompt_blocks: int = 0


@message("cache.StoreReply/1")
class StoreReply:
    """`slots[i]` is for hash number `indexes[i]`; the others are kept already, or not wanted."""

    lease_id: str
    slots: tuple[Slot, ...] = ()
    indexes: tuple[int, ...] = ()


@message("cache.LookupRequest/1")
class LookupRequest:
    """Asked on `cache.<instance>.lookup`: how long the leading run of these blocks is, by tier.

    Nothing is leased. `prefetch`: begin to bring the run from the files into memory.
    `traffic_class` is for the statistics.
    """

    salt: str
    hashes: bytes
    kind: str = "block"
    prefetch: bool = False
    traffic_class: str = ""


@message("cache.LookupReply/1")
class LookupReply:
    """`num_found` leading blocks are held in some tier, `num_host` of them in memory."""

    num_found: int
    num_host: int


@message("cache.PrefetchCommand/1")
class PrefetchCommand:
    """Published by a router on `cache.<instance>.prefetch` for a request that it has placed."""

    request_id: str
    salt: str
    hashes: bytes


@message("cache.ReadRequest/1")
class ReadRequest:
    """Asked on `cache.<instance>.read`: tickets of the leading run of these blocks, under a lease.

    At most 64 hashes. Blocks in the file tier are brought into memory first, waited for up to
    `wait_ms`. `lane` is what the reader can use: `shm` or `nats`. The lease (32 hex digits, drawn by
    the asker; the same for all reads of one request) keeps the blocks until `cache.release`.
    `traffic_class` is for the statistics.
    """

    request_id: str
    owner: str
    owner_epoch: int
    salt: str
    hashes: bytes
    lease_id: str
    kind: str = "block"
    lane: str = "shm"
    lease_ms: int = 10_000
    wait_ms: int = 2_000
    traffic_class: str = ""


@message("cache.ReadReply/1")
class ReadReply:
    """`tickets[i]` is of hash number i; there are fewer where the run ends, `miss` says why.

    `miss` is empty, `absent`, `expired`, `evicted`, `corrupt`, `slow` or `busy`. `num_from_files`
    of the tickets were read from the file tier for this request.
    """

    tickets: tuple[Ticket, ...] = ()
    miss: str = ""
    num_from_files: int = 0


@message("cache.BadBlock/1")
class BadBlock:
    """Published by a reader on `cache.<instance>.bad-block`: this ticket's copy failed `reason`."""

    salt: str
    hash: bytes
    ticket: Ticket
    reason: str
