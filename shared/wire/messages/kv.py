"""Who holds which KV blocks: numbered events, and snapshots for whoever missed one.

A block is named by (`salt`, hash): `salt` says whom its bytes fit (`CacheSpec.salt`), the hash is
the prompt's chained block hash, which gateways and engines compute alike. Hashes are 32 bytes each
and travel joined.
"""

from finback.shared.wire.codec import message


@message("kv.KvEvents/1")
class KvEvents:
    """Event `<service>.kv` of a worker (tier `device`) or a cache (tiers `host` and `file`).

    `seq` counts the messages of one (instance, epoch) from 1 on, whatever they speak of: a listener
    that misses a number asks for a snapshot. `is_reset`: nothing that was told before holds any
    more. In one message `removed` happens before `stored`.
    """

    service: str
    instance: str
    epoch: int
    seq: int
    salt: str
    tier: str
    stored: bytes = b""
    removed: bytes = b""
    is_reset: bool = False


@message("kv.KvSnapshotRequest/1")
class KvSnapshotRequest:
    """Asked on `<service>.<instance>.kv-snapshot`; `cursor` is that of the page before."""

    cursor: str = ""
    max_blocks: int = 16_384


@message("kv.KvHoldings/1")
class KvHoldings:
    """Blocks of one salt in one tier."""

    salt: str
    tier: str
    hashes: bytes


@message("kv.KvSnapshotReply/1")
class KvSnapshotReply:
    """One page of what is held after event `seq`; `next_cursor` is empty on the last page."""

    epoch: int
    seq: int
    holdings: tuple[KvHoldings, ...] = ()
    next_cursor: str = ""
