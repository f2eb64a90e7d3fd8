"""What operators ask of a cache service: how full it is, and what to keep, drop or check.

Asked on `cache.<instance>.<verb>`, or on `cache.<verb>` where any one instance will do. Each cache
answers for itself: to forget a tenant everywhere, ask all instances of the registry.
"""

from finback.shared.wire.codec import message


@message("cache.StatsRequest/1")
class StatsRequest:
    """Asked on `stats`. `num_prefixes`: how many of the most read prefixes to tell."""

    num_prefixes: int = 10


@message("cache.TierUsage/1")
class TierUsage:
    """Blocks of one tier (`host` or `file`), kind (`block` or `state`) and traffic class.

    `num_bytes` is what they take: whole slots in memory, records in files.
    """

    tier: str
    kind: str
    traffic_class: str
    num_blocks: int
    num_bytes: int


@message("cache.Tally/1")
class Tally:
    """How often something happened since this process began.

    `what`: `hit` (blocks, by tier), `miss` (reads that ended early, by cause), `gone` (blocks given
    up, by cause), `refused` (blocks not stored, by cause).
    """

    what: str
    label: str
    count: int


@message("cache.PrefixUse/1")
class PrefixUse:
    """One of the most read prefixes, named by its first block. `num_blocks`: the longest run read."""

    salt: str
    hash: bytes
    num_reads: int
    num_blocks: int


@message("cache.PinInfo/1")
class PinInfo:
    """A named prefix that is never given up: `num_held` of its `num_blocks` are in memory now."""

    name: str
    salt: str
    num_blocks: int
    num_held: int


@message("cache.UseTally/1")
class UseTally:
    """Blocks that were asked for, of a traffic class ("": the asker did not say), by outcome.

    `what`: `lookup` (what prompts could have had) or `read` (what was handed out). `outcome`: the tier
    (`host`, `file`), or why the run had ended before them (as `ReadReply.miss`).
    """

    what: str
    traffic_class: str
    outcome: str
    num_blocks: int


@message("cache.TenantUsage/1")
class TenantUsage:
    """One of the tenants with most in memory. `tenant`: 32 hex digits of a digest of the name."""

    tenant: str
    num_bytes: int


@message("cache.StatsReply/1")
class StatsReply:
    """`slots` are counts by state (`free`, `reserved`, `committed`, `quarantined`, `kept`).

    `max_bytes` is the arena's bound, `file_max_bytes` that of the file tier, `tenant_max_bytes` and
    `file_tenant_max_bytes` those of a tenant in either, `state_max_bytes` that of states; 0: none.
    `file_state`: `off`, `on`, or why the tier is left alone.
    """

    instance: str
    epoch: int
    arena_bytes: int
    max_bytes: int
    num_leases: int
    slots: dict[str, int]
    usage: tuple[TierUsage, ...] = ()
    tallies: tuple[Tally, ...] = ()
    prefixes: tuple[PrefixUse, ...] = ()
    pins: tuple[PinInfo, ...] = ()
    file_bytes: int = 0
    file_max_bytes: int = 0
    file_state: str = "off"
    num_waiting_writes: int = 0
    uses: tuple[UseTally, ...] = ()
    tenants: tuple[TenantUsage, ...] = ()
    tenant_max_bytes: int = 0
    state_max_bytes: int = 0
    file_tenant_max_bytes: int = 0


@message("cache.ForgetRequest/1")
class ForgetRequest:
    """Asked on `forget`: drop, in all tiers, what fits any one of these. Pins do not protect.

    `tenant` None: of no tenant ("" is that of requests without a key). `hashes` (joined, with their
    `salt`, or with "" in all salts) are the blocks of a conversation; `salt` alone: all it has.
    """

    tenant: str | None = None
    salt: str = ""
    hashes: bytes = b""
    is_all: bool = False


@message("cache.ForgetReply/1")
class ForgetReply:
    """Blocks dropped. Those that are being read go when their leases end; none is found any more."""

    num_host: int
    num_files: int = 0


@message("cache.PinRequest/1")
class PinRequest:
    """Asked on `pin`: never give these blocks up, now or when they are stored.

    The name (1 to 200 characters) replaces a pin of that name, and outlives restarts.
    """

    name: str
    salt: str
    hashes: bytes


@message("cache.UnpinRequest/1")
class UnpinRequest:
    """Asked on `unpin`; answered with a `PinReply` of 0 blocks, or `not_found`."""

    name: str


@message("cache.PinReply/1")
class PinReply:
    """`num_held` of the `num_blocks` are in memory now, `num_files` in files."""

    num_blocks: int
    num_held: int
    num_files: int = 0


@message("cache.EvictRequest/1")
class EvictRequest:
    """Asked on `evict`: give up blocks of `tier` (only `host`), in the order in which they would go.

    Until `num_bytes` are free of what may go (0: all of it), only of `traffic_class` and those below
    it (empty: of any), of `tenant` (None: of any), unused for `older_than_s` (0: of any age). What is
    leased or pinned stays.
    """

    tier: str = "host"
    num_bytes: int = 0
    traffic_class: str = ""
    tenant: str | None = None
    older_than_s: float = 0.0


@message("cache.EvictReply/1")
class EvictReply:
    """What was given up."""

    num_blocks: int
    num_bytes: int


@message("cache.VerifyRequest/1")
class VerifyRequest:
    """Asked on `verify`: check the checksums of blocks; bad ones are dropped.

    One request checks up to `max_bytes`; `cursor` is that of the reply before.
    """

    tier: str = "host"
    cursor: str = ""
    max_bytes: int = 268_435_456


@message("cache.VerifyReply/1")
class VerifyReply:
    """`next_cursor` is empty when all of the tier has been checked."""

    num_checked: int
    num_bad: int
    num_bytes: int
    next_cursor: str = ""


@message("cache.ForgetPoolRequest/1")
class ForgetPoolRequest:
    """Asked on `<role>.<instance>.forget-pool`: no later sequence finds what was computed so far.

    Of a tenant (all his salts), of the blocks with these hashes (joined), or, with neither, of
    anybody. Blocks that wait to be stored are not, and those that are being stored have been when the
    answer comes. Running sequences go on, and what they compute from then on is kept as ever.
    """

    tenant: str | None = None
    hashes: bytes = b""


@message("cache.ForgetPromptsReply/1")
class ForgetPromptsReply:
    """Answer to a `ForgetRequest` on `gateway.<instance>.forget`: encoded prompts dropped."""

    num_prompts: int


@message("cache.ExportRequest/1")
class ExportRequest:
    """Asked on `export`: write the leading run of these blocks, of a prompt from its start, to a file.

    `path` is a file of the cache's exchange folder, its name alone or with the folder's path. It must
    not exist; it is made 0600. Blocks in memory only are not exported: the file tier must be on.
    """

    path: str
    salt: str
    hashes: bytes
    block_size: int


@message("cache.ImportRequest/1")
class ImportRequest:
    """Asked on `import`: store an exported prefix under this cluster's key.

    `path` as of an export. `cache_salt` is what its chain begins with here, `tenant` whose it is.
    `retention_s` None: that of chat. `salts`: the file's blocks must fit one of these `CacheSpec`s;
    empty: any.
    """

    path: str
    cache_salt: str = ""
    retention_s: float | None = None
    tenant: str = ""
    salts: tuple[str, ...] = ()


@message("cache.ExchangeReply/1")
class ExchangeReply:
    """What was written or stored; `hashes` are those that an imported prefix has here."""

    num_blocks: int
    salt: str = ""
    hashes: bytes = b""
