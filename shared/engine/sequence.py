"""What the engine is asked to generate, and where it stands with it."""

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from finback.shared.wire.messages.generate import SamplingSpec

if TYPE_CHECKING:
    from finback.shared.engine.prefix_hold import PrefixHold

SequenceKey = tuple[str, int]
"""(request_id, choice)"""

Mode = Literal["full", "prefill", "decode"]
TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """One choice of a request.

    `token_ids`: the prompt, int32 [num_prompt_tokens]. `mode`:

    - `full`: compute the prompt, then generate;
    - `prefill`: compute the KV of all known tokens but the last, sample nothing, and hold the
      blocks until `release`;
    - `decode`: reserve blocks for the known tokens and wait for `activate`, then generate.

    `completion`: tokens of the answer that are known already, int32; the sequence goes on behind
    them as if it had made them (an answer that another instance began). They count for lengths,
    penalties and positions, and are not told again.

    `seed` replaces `sampling.seed` (each choice has its own). `credit_tokens`: how far behind the
    known completion the sequence may run before `grant`. `cache_salt` keeps prefixes of different
    tenants apart. `priority`: smaller is served first; equal ones by arrival.

    `tenant`, `traffic_class` and `retention_s` say whose its blocks are and how long a cache keeps
    them (None: as its class says); `trace` is the context of the request's spans.
    """

    key: SequenceKey
    attempt: int
    token_ids: TokenIds
    sampling: SamplingSpec
    seed: int
    completion: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    mode: Mode = "full"
    has_grammar: bool = False
    drafting: bool = False
    credit_tokens: int = 2**31 - 1
    cache_salt: bytes = b""
    priority: int = 0
    tenant: str = ""
    traffic_class: str = "chat"
    retention_s: float | None = None
    trace: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCounts:
    """The counts of a choice, for usage; an `EndInfo` without a reason."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_steps: int


class State(enum.Enum):
    """Where a sequence is. Blocks are owned in all states but ENDED (and WAITING at first)."""

    RESERVED = "reserved"  # mode decode, before activate
    WAITING = "waiting"  # queued; owns blocks only when just activated
    RUNNING = "running"  # has a slot
    HELD = "held"  # mode prefill, done, until release
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's own state of a sequence. Counts in tokens; "committed" means retired steps.

    `tokens[:num_tokens]` are known: the prompt and the committed completion. The KV of
    `tokens[:num_computed]` lies in `block_ids`. `in_flight` holds, for each step that is planned but
    not committed, the least and the most tokens that it computes; `flight_low` and `flight_high` are
    their sums. `hold` keeps its prefix in the pool until it has blocks of its own.

    Of models with state slots: `num_kept` tokens have KV in blocks that must not be written, though
    computing begins at `num_computed` (a replay). (position, payload): `given_state` came with the prompt,
    `last_state` is the newest snapshot; `start_state` is the one to begin with, if any.

    `arriving`: the hold whose arrival brings some of its blocks, until a step behind it is committed.

    `num_patient`: for so many tokens to come, its steps are planned only when their mask is there.
    """

    spec: SequenceSpec
    order: tuple[int, int]
    tokens: TokenIds
    num_prompt: int
    num_tokens: int
    max_total: int
    root_hash: bytes
    credit: int
    stops: frozenset[int]
    state: State = State.WAITING
    slot: int = -1
    incarnation: int = 0
    is_decoding: bool = False
    num_computed: int = 0
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    flight_low: int = 0
    flight_high: int = 0
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_sent_blocks: int = 0
    mask: tuple[int, bytes] | None = None
    num_patient: int = 0
    num_cached: int = -1
    num_reported: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    hold: "PrefixHold | None" = None
    arriving: "PrefixHold | None" = None
    num_kept: int = 0
    start_state: bytes | None = None
    given_state: tuple[int, bytes] | None = None
    last_state: tuple[int, bytes] | None = None

    def launch(self, low: int, high: int) -> None:
        """A step was planned that computes at least `low` and at most `high` of its tokens."""
        self.in_flight.append((low, high))
        self.flight_low += low
        self.flight_high += high

    def land(self) -> None:
        """The oldest step in flight is committed."""
        low, high = self.in_flight.popleft()
        self.flight_low -= low
        self.flight_high -= high

    @property
    def num_completion(self) -> int:
        """Committed completion tokens."""
        return self.num_tokens - self.num_prompt

    @property
    def num_cached_prompt(self) -> int:
        """Prompt tokens that were cached when the sequence came; 0 while that is not known."""
        return max(0, min(self.num_cached, self.num_prompt))

    @property
    def target(self) -> int:
        """How many known tokens are to be computed: a prompt to hand over lacks its last."""
        return self.num_tokens - 1 if self.spec.mode == "prefill" else self.num_tokens

    def counts(self, num_completion: int | None = None) -> SequenceCounts:
        """Counts so far, of a completion cut to `num_completion` tokens if given."""
        return SequenceCounts(
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached_prompt,
            num_completion_tokens=(
                self.num_completion if num_completion is None else num_completion
            ),
            num_draft_tokens=self.num_drafted,
            num_accepted_tokens=self.num_accepted,
            num_steps=self.num_steps,
        )
