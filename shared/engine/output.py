"""What an engine tells its owner; all of it on the event loop."""

from dataclasses import dataclass

from finback.shared.engine.sequence import SequenceKey, TokenIds
from finback.shared.wire.messages.generate import EndInfo, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The answer to `add`. `num_cached_tokens`: leading tokens whose KV is already here.

    In mode decode these blocks are held, so they need not be handed over; in the other modes the
    number is what holds now. `reason` of a refusal: `queue_full`, `too_long`, `no_blocks` (mode
    decode only: no room to reserve now), `duplicate` (this or a newer attempt is known), `empty`,
    `bad_token`, `stopped`.
    """

    accepted: bool
    num_cached_tokens: int = 0
    reason: str = ""
    message: str = ""


# Not frozen: one is made for every token, and freezing trebles what that costs.
@dataclass(slots=True, kw_only=True)
class SequenceOutput:
    """New tokens of one choice. `offset` is the index of the first one in the completion.

    A stop token is the last of `token_ids` and is named in `end`. An end is told exactly once,
    unless the owner itself ended the sequence (`finish`, `abort`). `num_cached`: prompt tokens that
    needed no computing.
    """

    key: SequenceKey
    attempt: int
    offset: int
    token_ids: TokenIds
    logprobs: tuple[TokenLogprob, ...] | None = None
    end: EndInfo | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """A mode-prefill sequence has the KV of its first `num_computed_tokens`; never goes back.

    At all known tokens but the last it is complete, and its blocks are held until `release`.
    """

    key: SequenceKey
    attempt: int
    num_computed_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """A step computed these tokens of a prompt (or of what a preempted sequence had), any mode."""

    key: SequenceKey
    attempt: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step brought, in the order of the steps.

    `prefilled` speaks of mode prefill, for the hand-over; `chunks` of all prompts, for traces.
    `want_masks`: (key, completion index) that sampling waits for. `want_drafts`: (key, absolute
    position) from which a guess would help. `rows` of the step is `num_rows`. A call without a step
    (a mask wanted for a new sequence, a prompt that needed no work) repeats the last number with
    `num_rows` 0.
    """

    step: int
    rows: tuple[SequenceOutput, ...] = ()
    prefilled: tuple[PrefillProgress, ...] = ()
    chunks: tuple[PromptChunk, ...] = ()
    want_masks: tuple[tuple[SequenceKey, int], ...] = ()
    want_drafts: tuple[tuple[SequenceKey, int], ...] = ()
    num_rows: int = 0
    started_s: float = 0.0
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is, for the router."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_waiting_tokens: int
    step_time_ms: float
    tokens_per_s: float
    num_preemptions: int = 0
