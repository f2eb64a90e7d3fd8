"""The registry's records, lifecycle events and what the supervisor tells."""

from finback.shared.wire.codec import message

WIRE_VERSION = 1


@message("control.CacheSpec/1")
class CacheSpec:
    """The KV geometry of an instance: blocks that fit nobody else's pool are never exchanged.

    `salt`: digest of weights, config, KV dtype, layout, block size, numerics class and, of models with
    state, its layout and the way it is replayed (hex). `state_bytes`: of a snapshot of a sequence's
    state, 0 for models without. `window_tokens`: the widest sliding window; `replay_tokens`: how
    many tokens computed anew restore the state exactly.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    block_bytes: int
    salt: str
    state_bytes: int = 0
    window_tokens: int = 0
    replay_tokens: int = 0


@message("control.InstanceRecord/1")
class InstanceRecord:
    """A leased entry of the registry bucket under `<service>.<instance>`."""

    service: str
    instance: str
    epoch: int
    pid: int
    host: str
    state: str
    wire_version: int = WIRE_VERSION
    model: str = ""
    roles: tuple[str, ...] = ()
    max_model_len: int = 0
    num_blocks: int = 0
    cache_spec: CacheSpec | None = None
    endpoints: dict[str, str] | None = None
    started_unix_s: float = 0.0


@message("control.InstanceLost/1")
class InstanceLost:
    """Event `supervisor.instance-lost`: the process has ended and will not answer.

    `is_crash` False: it ended in good order, or was ended because it hung.
    """

    service: str
    instance: str
    epoch: int
    reason: str
    is_crash: bool = True


@message("control.StateChanged/1")
class StateChanged:
    """Event `<service>.state`: starting, serving, draining, stopped."""

    service: str
    instance: str
    epoch: int
    state: str


@message("control.DrainCommand/1")
class DrainCommand:
    """Asked on `<service>.<instance>.drain`: finish what is open, take nothing new, then stop."""

    timeout_s: float = 30.0


@message("control.PingRequest/1")
class PingRequest:
    """Asked on `<service>.<instance>.ping`: is the event loop turning, does the engine advance."""


@message("control.PingReply/1")
class PingReply:
    """`progress` rises with every completed unit of work (a step, a request)."""

    instance: str
    epoch: int
    state: str
    progress: int = 0
