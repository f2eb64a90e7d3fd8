"""The scheduler's books: sequences, queues, slots and blocks, and the moves between them. Pure."""

import bisect
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from finback.shared.clock import monotonic_s
from finback.shared.engine.block_pool import BlockPool
from finback.shared.engine.prefix_hold import PrefixHolds
from finback.shared.engine.sequence import Sequence, SequenceCounts, SequenceKey, State, TokenIds
from finback.shared.engine.state_book import Pairs, StateBook, StateRules
from finback.shared.errors import InvariantViolated
from finback.shared.kv import block_hash

MAX_ENDED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler must know; see `EngineConfig` for the meanings.

    `max_span_tokens`: as `max_draft_tokens`, of sequences with a grammar.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 256
    max_draft_tokens: int = 4
    max_span_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    prefix_caching: bool = True
    cache_key: bytes = b""
    state: StateRules | None = None

    def __post_init__(self) -> None:
        if self.max_model_len > self.num_blocks * self.block_size:
            raise ValueError("the pool cannot hold a lone sequence of max_model_len")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRecord:
    """What stays of an ended choice until its owner forgets it."""

    attempt: int
    token_ids: TokenIds
    counts: SequenceCounts


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class SequenceTable:
    """All live sequences. `running` and `waiting` are sorted by (priority, arrival).

    `on_registered` hears (sequence, index) of each full block that was computed here and is new.
    `states`: of models with state slots. `now_s`: the clock by which snapshots expire.
    """

    def __init__(self, config: SchedulerConfig, now_s: Callable[[], float] = monotonic_s) -> None:
        self.config = config
        self.states: StateBook | None = None
        if config.state is not None:
            self.states = StateBook(config.state, config.block_size, now_s)
        self.pool = BlockPool(config.num_blocks)
        self.holds = PrefixHolds(self.pool, config.block_size, config.cache_key)
        self.on_registered: Callable[[Sequence, int], None] | None = None
        self.by_key: dict[SequenceKey, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.ending: set[Sequence] = set()
        self.ended: OrderedDict[SequenceKey, EndedRecord] = OrderedDict()
        self.free_slots = list(range(config.max_num_seqs))
        self.num_preemptions = 0

    # -- blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.config.block_size)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest prefix that is here; the last known token is never among them."""
        if not self.config.prefix_caching:
            return []
        count = (sequence.num_tokens - 1) // self.config.block_size
        found = self.pool.match(self._block_pairs(sequence, count))
        if sequence.hold is not None and sequence.hold.is_arriving:
            found += self.holds.arriving(sequence.hold, self.pairs(sequence, count), len(found))
        return found

    def take_blocks(self, sequence: Sequence, num_tokens: int, spare: int = 0) -> bool:
        """Give a sequence without blocks its prefix hits and fresh blocks for `num_tokens`.

        False, and nothing taken, unless `spare` blocks would still be left.
        """
        hits = self.match_prefix(sequence)
        num_fresh = self.blocks_for(num_tokens) - len(hits)
        if not self._has_room(num_fresh + spare, hits):
            return False
        self.pool.acquire(hits)
        fresh = self.pool.allocate(num_fresh)
        if fresh is None:
            raise InvariantViolated("free KV blocks were miscounted")
        sequence.block_ids = hits + fresh
        sequence.num_registered = len(hits)
        self._begin(sequence, len(hits) * self.config.block_size)
        if sequence.num_cached < 0:
            sequence.num_cached = sequence.num_computed
        if sequence.hold is not None and sequence.hold.is_arriving:
            sequence.arriving = sequence.hold
        self.drop_hold(sequence)
        return True

    def num_cached(self, sequence: Sequence) -> int:
        """Leading tokens that it would not compute if it had its blocks now."""
        hits = len(self.match_prefix(sequence))
        num_kept = hits * self.config.block_size
        if self.states is None:
            return num_kept
        return self.states.start_of(num_kept, self.pairs(sequence, hits)).position

    def _begin(self, sequence: Sequence, num_kept: int) -> None:
        """The first `num_kept` tokens have KV in its blocks: where does it compute on?"""
        if self.states is None:
            sequence.num_computed = num_kept
        else:
            full = self.pairs(sequence, num_kept // self.config.block_size)
            self.states.begin(sequence, num_kept, full)

    def take_over(self, sequence: Sequence, num_known: int) -> None:
        """The KV of its first `num_known` tokens was brought; make what is full of it findable."""
        num_kept = max(sequence.num_computed, sequence.num_kept, num_known)
        self._begin(sequence, num_kept)
        self._register(sequence, num_kept, is_computed=False)

    def _has_room(self, num_fresh: int, hits: list[int]) -> bool:
        """Are so many blocks free beside `hits`? If need be, holds on prefixes are given up."""
        lacking = num_fresh + self.pool.count_free(hits) - self.pool.num_free
        if lacking > 0 and lacking > self.holds.num_to_give_up(hits):
            return False
        while num_fresh + self.pool.count_free(hits) > self.pool.num_free:
            if not self.holds.give_up_one():
                return False
        return True

    def drop_hold(self, sequence: Sequence) -> None:
        """Its prefix needs no holding any more."""
        if sequence.hold is not None:
            self.holds.release(sequence.hold)
            sequence.hold = None

    def drop_blocks(self, sequence: Sequence) -> None:
        """Give all blocks of a sequence back."""
        self.pool.release(sequence.block_ids)
        sequence.block_ids = []
        sequence.arriving = None
        sequence.num_registered = 0
        sequence.num_sent_blocks = 0

    def register_blocks(self, sequence: Sequence) -> None:
        """Make full blocks findable whose KV is final and whose tokens are committed."""
        self._register(sequence, sequence.num_computed, is_computed=True)

    def _register(self, sequence: Sequence, num_final: int, *, is_computed: bool) -> None:
        """`is_computed`: here, rather than brought from another instance."""
        count = min(num_final, sequence.num_tokens) // self.config.block_size
        if count <= sequence.num_registered or not self.config.prefix_caching:
            return
        pairs = list(self._block_pairs(sequence, count))
        for index in range(sequence.num_registered, count):
            block_id, salt = sequence.block_ids[index], sequence.spec.cache_salt
            is_new = self.pool.register(block_id, *pairs[index], salt)
            if is_new and is_computed and self.on_registered is not None:
                self.on_registered(sequence, index)
        sequence.num_registered = count

    def forget_past(self, sequence: Sequence, num_tokens: int) -> None:
        """Nobody shall find blocks with tokens past these: they lie behind the completion's end."""
        first = num_tokens // self.config.block_size
        self.pool.unregister(sequence.block_ids[first : sequence.num_registered])

    def unregistered_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the full blocks of its known tokens, those that nobody can find yet."""
        if not self.config.prefix_caching:
            return []
        count = sequence.num_tokens // self.config.block_size
        return [block_hash for block_hash, _ in self._block_pairs(sequence, count)][
            sequence.num_registered :
        ]

    def pairs(self, sequence: Sequence, count: int) -> Pairs:
        """(hash, token bytes) of its first `count` full blocks."""
        return list(self._block_pairs(sequence, count))

    def keep_state(self, sequence: Sequence, num_tokens: int) -> None:
        """Its newest snapshot may serve others now, unless it lies past its first `num_tokens`."""
        if self.states is not None and self.config.prefix_caching:
            self.states.keep(sequence, partial(self.pairs, sequence), num_tokens)

    def block_hash(self, sequence: Sequence, index: int) -> bytes:
        """The hash of a full block of its known tokens."""
        return [block_hash for block_hash, _ in self._block_pairs(sequence, index + 1)][index]

    def _block_pairs(self, sequence: Sequence, count: int) -> Iterator[tuple[bytes, bytes]]:
        size = self.config.block_size
        hashes = sequence.hashes
        for index in range(count):
            data = sequence.tokens[index * size : (index + 1) * size].tobytes()
            if index == len(hashes):
                parent = hashes[-1] if hashes else sequence.root_hash
                hashes.append(block_hash.extend(parent, data, self.config.cache_key))
            yield hashes[index], data

    # -- queues and slots

    def enqueue(self, sequence: Sequence) -> None:
        """Into the waiting queue, at its place by order."""
        sequence.state = State.WAITING
        bisect.insort(self.waiting, sequence, key=_order)

    def enter_slot(self, sequence: Sequence) -> None:
        """From waiting to running."""
        self.waiting.remove(sequence)
        sequence.state = State.RUNNING
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.incarnation += 1
        sequence.num_sent_blocks = 0
        bisect.insort(self.running, sequence, key=_order)

    def leave_slot(self, sequence: Sequence) -> None:
        """Out of running; the caller says where to.

        The slot may be used by the next plan although a step in flight still names it: the device
        runs plans in order.
        """
        self.running.remove(sequence)
        heapq.heappush(self.free_slots, sequence.slot)
        sequence.slot = -1
        sequence.is_decoding = False

    def preempt(self, sequence: Sequence) -> None:
        """Take the blocks (and slot) of a sequence away; it recomputes them when it comes back.

        Blocks may be used by the next plan although a step in flight still writes to them: the
        device runs plans in order, and unfinished blocks are not registered. What that step samples
        is a valid token all the same and is committed.
        """
        self._send_back(sequence)
        if self.states is not None:
            self.keep_state(sequence, sequence.num_tokens)
            self.states.forget_start(sequence)
        sequence.num_preemptions += 1
        self.num_preemptions += 1

    def begin_again(self, sequence: Sequence) -> None:
        """Blocks that were to come behind a step that ran did not: queue it as if it had just come."""
        self._send_back(sequence)
        sequence.num_cached = -1

    def _send_back(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self.leave_slot(sequence)
            self.enqueue(sequence)
        self.drop_blocks(sequence)
        sequence.num_computed = 0

    def end(self, sequence: Sequence, num_kept_tokens: int | None = None) -> None:
        """Out of everything. Its blocks go when no step in flight uses them.

        `num_kept_tokens`: how many of its tokens count, if not all.
        """
        num_tokens = sequence.num_tokens if num_kept_tokens is None else num_kept_tokens
        self.keep_state(sequence, num_tokens)
        if sequence.state is State.RUNNING:
            self.leave_slot(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.ENDED
        self.drop_hold(sequence)
        if self.by_key.get(sequence.spec.key) is sequence:
            del self.by_key[sequence.spec.key]
        if sequence.in_flight:
            self.ending.add(sequence)
        else:
            self.drop_blocks(sequence)

    def retire(self, sequence: Sequence) -> None:
        """An ended sequence's item retired; free its blocks with the last one."""
        if not sequence.in_flight:
            self.ending.discard(sequence)
            self.drop_blocks(sequence)

    def remember(self, sequence: Sequence) -> None:
        """Keep an ended choice's tokens for resume and counts for `finish`, within a bound."""
        self.ended[sequence.spec.key] = EndedRecord(
            attempt=sequence.spec.attempt,
            token_ids=sequence.tokens[sequence.num_prompt : sequence.num_tokens].copy(),
            counts=sequence.counts(),
        )
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    # -- checks

    def check_integrity(self) -> None:
        """Raise `InvariantViolated` if the books do not add up; for tests and idle times."""
        self.pool.check_integrity()
        if self.states is not None:
            self.states.check_integrity([*self.by_key.values(), *self.ending])
        refs = [0] * self.pool.num_blocks
        for sequence in (*self.by_key.values(), *self.ending):
            for block_id in sequence.block_ids:
                refs[block_id] += 1
        for block_id in self.holds.block_ids():
            refs[block_id] += 1
        wrong = [b for b in range(len(refs)) if refs[b] != self.pool.ref_count(b)]
        if wrong:
            raise InvariantViolated(f"reference counts of KV blocks {wrong[:8]} are wrong")
        slots = sorted([*self.free_slots, *(s.slot for s in self.running)])
        if slots != list(range(self.config.max_num_seqs)):
            raise InvariantViolated("slots are lost or used twice")
        for queue, state in ((self.running, State.RUNNING), (self.waiting, State.WAITING)):
            if [s.order for s in queue] != sorted(s.order for s in queue):
                raise InvariantViolated(f"the {state.value} queue is out of order")
            if any(s.state is not state for s in queue):
                raise InvariantViolated(f"a sequence is in the wrong queue ({state.value})")
