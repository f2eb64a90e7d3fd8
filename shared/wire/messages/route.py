"""The router: where a request goes, or why not."""

from finback.shared.wire.codec import message


@message("route.RouteRequest/1")
class RouteRequest:
    """Asked by a gateway on `router.route`. No token ids: lengths and hashes are enough.

    `block_hashes`: the prompt's chained block hashes, 32 bytes each, joined. `exclude`: instances
    that failed an earlier attempt.
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


@message("route.RouteReply/1")
class RouteReply:
    """A placement and the reason for it. Both instances are the same when roles are co-hosted."""

    prefill_instance: str
    prefill_epoch: int
    decode_instance: str
    decode_epoch: int
    reason: str
    num_hit_tokens: int = 0


@message("route.RequestEnded/1")
class RequestEnded:
    """Published by a gateway as event `gateway.request-ended`, so that load is not overcounted."""

    request_id: str
    attempt: int
    decode_instance: str
    tenant: str = ""
    num_tokens: int = 0
