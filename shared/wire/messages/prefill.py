"""The prefill role: computes a prompt and hands it to a decode instance."""

from finback.shared.wire.codec import message
from finback.shared.wire.messages.generate import GenerationSpec


@message("prefill.PrefillRequest/1")
class PrefillRequest:
    """Asked by a gateway on `prefill.<instance>.generate`; answered as soon as it is queued.

    When `num_chunks` is above one the token ids follow on `prefill.<instance>.chunk`.
    `decode_computes_tokens`: if decode lacks at most so many prompt tokens it computes them itself.
    """

    spec: GenerationSpec
    decode_instance: str
    decode_epoch: int
    num_chunks: int = 1
    decode_computes_tokens: int = 0


@message("prefill.TokenChunk/1")
class TokenChunk:
    """One piece of a long prompt's token ids (at most 256 KiB), `index` from 1."""

    request_id: str
    attempt: int
    index: int
    token_ids: bytes


@message("prefill.PrefillAccepted/1")
class PrefillAccepted:
    """The prompt is queued; from here on decode (or an error event) speaks for the request."""

    instance: str
    epoch: int


@message("prefill.CancelRequest/1")
class CancelRequest:
    """Asked on `<role>.<instance>.cancel`. Idempotent. `choice` None means all choices."""

    request_id: str
    attempt: int
    choice: int | None = None
    reason: str = ""


@message("prefill.CancelReply/1")
class CancelReply:
    """Acknowledges a cancel: the work has stopped and its blocks are free."""

    found: bool


@message("prefill.PrefillFailed/1")
class PrefillFailed:
    """Asked by prefill on `gateway.<instance>.failed` when a prompt cannot be completed."""

    request_id: str
    attempt: int
    instance: str
    code: str
    public_message: str
    reason: str = ""


@message("prefill.Ack/1")
class Ack:
    """Nothing to say but that it was taken."""
