"""The seam between the scheduler and the runner: a plan goes in, a result comes out.

A plan says which rows to run, not at which position: what depends on the step before (the sampled
token, how many drafts were accepted) the runner knows from its own state of the slot, so that plan
t + 1 can be made while step t runs.
"""

from dataclasses import dataclass
from typing import Literal

from finback.shared.engine.arrival import Arrival
from finback.shared.engine.sequence import Sequence, SequenceSpec, TokenIds
from finback.shared.wire.messages.generate import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotInit:
    """A sequence enters a slot: all its known tokens, of which `num_computed` have KV.

    The sequence never holds more than `max_total` tokens; the KV of its last one is not needed.
    With state slots: the KV of the first `num_kept` tokens stays as it is.
    """

    spec: SequenceSpec
    tokens: TokenIds
    num_prompt: int
    num_computed: int
    max_total: int
    stops: frozenset[int]
    incarnation: int
    num_kept: int = 0


CaptureKind = Literal["", "block", "end"]


@dataclass(slots=True, kw_only=True)
class PlanItem:
    """One sequence of a step.

    `num_rows` tokens from the slot's `num_computed` on are fed. `is_sampled`: they reach the last
    known token, so the next one is sampled (`is_chunk`: it did not decode before); `max_drafts` more rows may be added for drafts that are
    at hand at launch. `new_block_ids` are appended to the slot's block table. `bitmask` allows the
    tokens of a grammar (int32 LE [ceil(vocab / 32)]) behind a prompt; the masks of a sequence that
    decodes come while the step runs (`mask_shelf`).

    With state slots: `state` is the snapshot that a sequence begins with, None: windows begin where
    it does. `capture`: copy the state at the last block's
    end that this step reaches, or where the step ends.

    `arrival`: some of its blocks are still on their way.
    """

    sequence: Sequence
    slot: int
    incarnation: int
    num_rows: int
    is_sampled: bool
    is_chunk: bool = False
    max_drafts: int = 0
    init: SlotInit | None = None
    new_block_ids: tuple[int, ...] = ()
    bitmask: bytes | None = None
    state: bytes | None = None
    capture: CaptureKind = ""
    arrival: Arrival | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. `num_rows` is the most that it can take (with all drafts).

    `num_reserved`: of these, rows for guesses along a grammar, of which most steps have none.
    """

    step: int
    items: tuple[PlanItem, ...]
    num_rows: int
    num_reserved: int = 0


# Not frozen: one is made for every row of a step, and freezing trebles what that costs.
@dataclass(slots=True, kw_only=True)
class ItemResult:
    """What became of an item, in the order of the plan.

    `num_computed`: tokens whose KV is now final (drafts that were refused do not count).
    `token_ids`: the new tokens, one more than drafts were accepted; empty without sampling, or when
    the sequence was already complete. `error`: the model gave no finite logits. `states`: snapshots
    that were asked for, (position, payload). `is_late`: its mask did not come in time, nothing happened.
    `is_void`: blocks that were on their way did not come, or not whole; nothing of it counts.
    """

    num_computed: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_drafted: int = 0
    error: str = ""
    states: tuple[tuple[int, bytes], ...] = ()
    is_late: bool = False
    is_void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """A retired step; times are of the device thread, on the monotonic clock."""

    step: int
    items: tuple[ItemResult, ...]
    num_rows: int
    started_s: float
    duration_ms: float
