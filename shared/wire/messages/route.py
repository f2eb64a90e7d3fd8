"""The router: whether a request may come in, where it goes, or why not."""

from finback.shared.wire.codec import message


@message("route.RouteRequest/1")
class RouteRequest:
    """Asked by a gateway on `router.route`. No token ids: lengths and hashes are enough.

    `block_hashes`: the prompt's chained block hashes, 32 bytes each, joined. `exclude`: instances
    that failed an earlier attempt. `session` names the conversation, empty if it has no name.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    max_tokens: int
    num_choices: int = 1
    block_hashes: bytes = b""
    tenant: str = ""
    traffic_class: str = "chat"
    attempt: int = 1
    exclude: tuple[str, ...] = ()
    session: str = ""


@message("route.RouteReply/1")
class RouteReply:
    """A placement and the reason for it. Both instances are the same when roles are co-hosted.

    `decode_computes_tokens`: if decode lacks at most so many prompt tokens, it computes them itself
    and nothing is handed over; the gateway passes this on to prefill.
    """

    prefill_instance: str
    prefill_epoch: int
    decode_instance: str
    decode_epoch: int
    reason: str
    num_hit_tokens: int = 0
    decode_computes_tokens: int = 0


@message("route.RequestEnded/1")
class RequestEnded:
    """Published by a gateway as event `gateway.request-ended`, so that load is not overcounted."""

    request_id: str
    attempt: int
    decode_instance: str
    tenant: str = ""
    num_tokens: int = 0


@message("route.AdmitRequest/1")
class AdmitRequest:
    """Asked by a gateway on `router.<instance>.admit`, once an API request, before any placement.

    The eldest router is asked, so that all gateways' requests are counted in one place. Limits are
    the tenant's, 0 meaning none. `num_prompt_tokens`: of all prompts together; `num_most_tokens`:
    those and all that may be generated. `settled`: (request id, tokens used) of the gateway's
    requests that have ended lately; they are heard before this one is judged.
    """

    request_id: str
    gateway: str
    tenant: str
    num_prompt_tokens: int
    num_most_tokens: int
    requests_per_min: int = 0
    tokens_per_min: int = 0
    max_concurrency: int = 0
    settled: tuple[tuple[str, int], ...] = ()


@message("route.RateState/1")
class RateState:
    """One limit a minute: what is left of it, and in how many milliseconds all of it is back."""

    limit: int
    remaining: int
    reset_ms: int


@message("route.AdmitReply/1")
class AdmitReply:
    """`reason` empty: admitted, and held until it is settled or its gateway falls silent.

    `is_hopeless`: it fits at no time. A limit that there is none of is None.
    """

    reason: str = ""
    retry_after_ms: int = 0
    is_hopeless: bool = False
    num_open: int = 0
    requests: RateState | None = None
    tokens: RateState | None = None


@message("route.TenantLedger/1")
class TenantLedger:
    """Published by a gateway as event `gateway.tenant-ledger`, for all routers.

    `settled`: (request id, tokens used) of requests that are over. `held`: (request id, tenant) of
    some that are open; told every other second of all, so that a router that is new knows them.
    """

    gateway: str
    settled: tuple[tuple[str, int], ...] = ()
    held: tuple[tuple[str, str], ...] = ()
