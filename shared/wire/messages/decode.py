"""The decode role: takes over prompts, streams tokens."""

from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.codec import message
from finback.shared.wire.messages.generate import GenerationSpec, TokenRow


@message("decode.ReserveRequest/1")
class ReserveRequest:
    """Asked by prefill on `decode.<instance>.reserve` before it computes anything.

    `cache_instance` is the cache whose arena prefill writes to (empty: none; None: it does not say),
    `file_address` where decode finds prefill's files of lane `file`: what decode chooses a lane by.
    """

    spec: GenerationSpec
    prefill_instance: str
    prefill_epoch: int
    num_chunks: int = 1
    cache_instance: str | None = None
    file_address: str = ""


@message("decode.ReserveReply/1")
class ReserveReply:
    """Blocks are reserved. Blocks below `num_cached_tokens` need not be handed over.

    `lane` is the lane that decode chose towards prefill: `shm`, `file` or `nats`.
    """

    epoch: int
    num_cached_tokens: int
    lane: str


@message("decode.HandoffRequest/1")
class HandoffRequest:
    """Asked by prefill on `decode.<instance>.handoff`: blocks that are ready to be copied.

    `tickets[i]` holds the KV of block `first_block + i` (all layers). `is_last` starts decoding.
    `num_tokens`: tokens whose KV is covered once this is taken (the prompt and what is known of the
    first choice, less the last of it). `state`, with the last message, of models that have some: the
    state at `num_tokens`; decode can do without, but must then compute some tokens again. `snapshot`,
    of generations with several choices: the state at the end of the prompt's last full block, where
    the other choices begin.
    """

    request_id: str
    attempt: int
    first_block: int
    tickets: tuple[Ticket, ...]
    num_tokens: int
    is_last: bool
    num_cached_tokens: int = 0
    state: Ticket | None = None
    snapshot: Ticket | None = None


@message("decode.HandoffReply/1")
class HandoffReply:
    """The blocks were copied and verified; prefill may release them.

    `missing`: blocks whose ticket failed its checksum; decode recomputes from the first of them.
    """

    num_copied_blocks: int
    missing: tuple[int, ...] = ()


@message("decode.CreditCommand/1")
class CreditCommand:
    """Published by a gateway on `decode.<instance>.credit`: choices may run up to these offsets."""

    grants: tuple[tuple[str, int, int], ...]


@message("decode.FinishRequest/1")
class FinishRequest:
    """Asked by a gateway on `decode.<instance>.finish`: a stop string ended a choice.

    The completion keeps its first `num_tokens` tokens; what ran over is neither shown nor counted.
    """

    request_id: str
    choice: int
    attempt: int
    num_tokens: int


@message("decode.FinishReply/1")
class FinishReply:
    """The choice has stopped; its counts, for the usage report."""

    found: bool
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0


@message("decode.ResumeRequest/1")
class ResumeRequest:
    """Asked by a gateway on `decode.<instance>.resume` after a gap: tokens from `offset` on."""

    request_id: str
    choice: int
    attempt: int
    offset: int


@message("decode.ResumeReply/1")
class ResumeReply:
    """The tokens asked for; None if the choice is not known here."""

    row: TokenRow | None = None


@message("decode.EndAck/1")
class EndAck:
    """Published by a gateway on `decode.<instance>.ended`: these choices need no resume any more."""

    ended: tuple[tuple[str, int, int], ...]


@message("decode.LoadReport/1")
class LoadReport:
    """Event `<role>.load`, 2 to 4 a second: what a worker is busy with. The last one wins."""

    instance: str
    epoch: int
    role: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_waiting_tokens: int = 0
    step_time_ms: float = 0.0
    tokens_per_s: float = 0.0
