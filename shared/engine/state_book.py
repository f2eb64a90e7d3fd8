"""State in the scheduler's books: where a sequence begins, which snapshots it leaves. Pure but for the clock.

A sequence's state lives in the slot that it runs in, and comes and goes with that: the device runs
plans in order and copies a snapshot within the step that reached its position, so a slot may change
hands with the very next plan. What is kept here are copies on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from finback.shared.engine.sequence import Sequence
from finback.shared.errors import InvariantViolated
from finback.shared.kv.state_policy import ReplayRule, Start, capture_position, choose_start
from finback.shared.kv.state_snapshots import STATE_LIFE_S, SnapshotPool

Pairs = list[tuple[bytes, bytes]]
"""(chained hash, token bytes) of leading blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRules:
    """What the books must know of a model's state; `snapshot_bytes`: memory for all snapshots."""

    rule: ReplayRule
    snapshot_bytes: int
    life_s: float = STATE_LIFE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSnapshot:
    """State at the end of block `index` of a sequence, under that block's hash."""

    hash: bytes
    tokens: bytes
    index: int
    payload: bytes


class StateBook:
    """`now_s`: a monotonic clock. `on_snapshot` hears (sequence, snapshot) of each one kept.

    `on_begin` hears of each sequence that begins behind block KV: with what (`snapshot`, `given`,
    `replay`), and how many tokens it computes again.
    """

    def __init__(self, rules: StateRules, block_size: int, now_s: Callable[[], float]) -> None:
        self.rules: Final = rules
        self.pool = SnapshotPool(rules.snapshot_bytes, rules.life_s)
        self.on_snapshot: Callable[[Sequence, NewSnapshot], None] | None = None
        self.on_begin: Callable[[str, int], None] | None = None
        self.num_replayed_tokens = 0
        self._block_size = block_size
        self._now_s = now_s

    # -- where to begin

    def start_of(self, num_kept: int, pairs: Pairs) -> Start:
        """Where a sequence would begin whose first `num_kept` tokens have block KV."""
        size = self._block_size
        found = self.pool.indexes(pairs, self._now_s())
        return choose_start(num_kept, [(index + 1) * size for index in found], self.rules.rule)

    def _take(self, start: Start, pairs: Pairs) -> bytes | None:
        if start.snapshot is None:
            return None
        return self.pool.take(pairs[start.snapshot // self._block_size - 1][0], self._now_s())

    def begin(self, sequence: Sequence, num_kept: int, pairs: Pairs) -> None:
        """Set where a sequence begins; `pairs` are the full blocks among its `num_kept` tokens.

        State that was handed over with the prompt serves if it belongs just there.
        """
        sequence.num_kept = num_kept
        start = self.start_of(num_kept, pairs)
        given = sequence.given_state
        if given is not None and start.position <= given[0] <= num_kept and given[0]:
            sequence.num_computed, sequence.start_state = given
            how = "given"
        else:
            sequence.start_state = self._take(start, pairs)
            if start.snapshot is not None and sequence.start_state is None:  # it has just expired
                start = choose_start(num_kept, (), self.rules.rule)
            sequence.num_computed = start.position
            how = "replay" if sequence.start_state is None else "snapshot"
        num_replayed = num_kept - sequence.num_computed
        self.num_replayed_tokens += num_replayed
        if self.on_begin is not None and num_kept:
            self.on_begin(how, num_replayed)

    def forget_start(self, sequence: Sequence) -> None:
        """Its blocks are taken away: what it began with is of no use any more."""
        sequence.num_kept = 0
        sequence.start_state = sequence.given_state = None

    # -- what to keep

    def cut(self, sequence: Sequence) -> int:
        """The position at which its prompt's chunks part, because a snapshot is taken there."""
        return capture_position(sequence.num_tokens, self._block_size)

    def keep(self, sequence: Sequence, pairs: Callable[[int], Pairs], num_tokens: int) -> None:
        """Put its last snapshot into the pool, if it lies at the end of a block of its first tokens."""
        if sequence.last_state is None:
            return
        position, payload = sequence.last_state
        if position > num_tokens or position % self._block_size or not position:
            return
        index = position // self._block_size - 1
        block_hash, tokens = pairs(index + 1)[index]
        self.pool.expire(self._now_s())
        if block_hash in self.pool or not self.pool.put(block_hash, tokens, payload, self._now_s()):
            return
        if self.on_snapshot is not None:
            self.on_snapshot(
                sequence,
                NewSnapshot(hash=block_hash, tokens=tokens, index=index, payload=payload),
            )

    def put(self, block_hash: bytes, tokens: bytes, payload: bytes) -> bool:
        """Keep a snapshot that was brought; False if it does not fit at all."""
        return self.pool.put(block_hash, tokens, payload, self._now_s())

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Raise `InvariantViolated` if the books do not add up."""
        self.pool.check_integrity()
        for sequence in sequences:
            for state in (sequence.last_state, sequence.given_state):
                if state is not None and state[0] > sequence.tokens.size:
                    raise InvariantViolated(f"a state of {sequence.spec.key} lies past its end")
            if sequence.num_kept > len(sequence.block_ids) * self._block_size:
                raise InvariantViolated(f"{sequence.spec.key} keeps tokens without blocks")
