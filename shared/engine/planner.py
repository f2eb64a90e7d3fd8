"""Which rows the next step takes. Pure: reads and moves the table, touches no tensor and no clock.

Order of a step: a row (and drafts) for every sequence that decodes, then chunks of prompts that run,
then new ones, by (priority, arrival) within each. Sequences without credit or without their mask
are skipped alone. When blocks run out the youngest sequence is preempted; the oldest never is for
a younger one, so somebody always gets on.
"""

from dataclasses import dataclass, field

from finback.shared.engine.arrival import Arrival
from finback.shared.engine.plan import CaptureKind, PlanItem, SlotInit, StepPlan
from finback.shared.engine.sequence import Sequence, State
from finback.shared.engine.table import SequenceTable

MIN_CHUNK_TOKENS = 64
MIN_SHARED_TOKENS = 256
"""A prompt waits for so much of it that another one is just computing."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    items: list[PlanItem] = field(default_factory=list)
    num_reserved: int = 0

    def add(self, item: PlanItem) -> None:
        self.items.append(item)
        num_most = item.num_rows + item.max_drafts
        self.budget -= num_most
        if item.sequence.spec.has_grammar:
            self.num_reserved += item.max_drafts
        item.sequence.launch(item.num_rows, num_most)


def computed_low(sequence: Sequence) -> int:
    """Tokens that are surely computed when all steps in flight have retired."""
    return sequence.num_computed + sequence.flight_low


def computed_high(sequence: Sequence) -> int:
    """The most tokens that may be computed when all steps in flight have retired."""
    return sequence.num_computed + sequence.flight_high


def has_credit(sequence: Sequence) -> bool:
    """May the completion get longer, as far as is committed?"""
    return sequence.num_completion < sequence.credit


def can_sample(sequence: Sequence) -> bool:
    """May its next token be sampled by the next step, whatever those in flight bring?

    While it decodes, known tokens = computed tokens + 1. Its mask may still be missing then: it comes
    while the step runs. Where it was late lately, it is awaited first.
    """
    low = high = sequence.num_tokens
    if sequence.is_decoding:
        low = sequence.num_computed + sequence.flight_low + 1
        high = sequence.num_computed + sequence.flight_high + 1
    if low >= sequence.max_total or high - sequence.num_prompt >= sequence.credit:
        return False
    if not sequence.spec.has_grammar:
        return True
    if sequence.is_decoding and not sequence.num_patient:
        return True
    if sequence.is_decoding and sequence.in_flight:
        return False
    return sequence.mask is not None and sequence.mask[0] == sequence.num_completion


def _next_chunk(sequence: Sequence, budget: int, cut: int = 0) -> tuple[int, bool]:
    """(rows, whether the last one is sampled from) of a sequence that does not decode yet.

    `cut`: a position at which chunks part.
    """
    start = computed_low(sequence)
    may_sample = sequence.spec.mode != "prefill" and can_sample(sequence)
    end = sequence.target
    if sequence.spec.mode != "prefill" and not may_sample:
        end -= 1  # all but the token whose logits would be sampled from
    num_rows = min(budget, (cut if start < cut < end else end) - start)
    return num_rows, may_sample and start + num_rows == sequence.num_tokens


def _slot_init(sequence: Sequence) -> SlotInit:
    return SlotInit(
        spec=sequence.spec,
        tokens=sequence.tokens[: sequence.num_tokens].copy(),
        num_prompt=sequence.num_prompt,
        num_computed=sequence.num_computed,
        num_kept=sequence.num_kept,
        max_total=sequence.max_total,
        stops=sequence.stops,
        incarnation=sequence.incarnation,
    )


class StepPlanner:
    """Makes plans over a table; `held` collects prompts that turned out to need no work."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._config = table.config
        self._states = table.states
        self._next_step = 1
        self.held: list[Sequence] = []

    def plan(self, max_chunk_rows: int | None = None) -> StepPlan | None:
        """The next step, or None when nothing can run. Everything planned counts as in flight.

        `max_chunk_rows` (positive): most rows of prompts in a step in which sequences decode, lest they wait long
        for their next token.
        """
        draft = _Draft(self._config.max_num_batched_tokens)
        self._plan_decoding(draft)
        kept_free = 0
        if draft.items and max_chunk_rows is not None:
            kept_free = max(0, draft.budget - max_chunk_rows)
            draft.budget -= kept_free
        self._plan_chunks(draft)
        self._admit(draft)
        if not draft.items:
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        num_rows = self._config.max_num_batched_tokens - draft.budget - kept_free
        return StepPlan(
            step=step,
            items=tuple(draft.items),
            num_rows=num_rows,
            num_reserved=draft.num_reserved,
        )

    # -- sequences that decode

    def _plan_decoding(self, draft: _Draft) -> None:
        ready = [s for s in self._table.running if s.is_decoding and can_sample(s)]
        if not ready:
            return
        num_chunking = len(self._table.running) - sum(s.is_decoding for s in self._table.running)
        kept_back = 0
        if num_chunking or self._table.waiting:
            kept_back = min(MIN_CHUNK_TOKENS, draft.budget // 2)
        spare_rows = draft.budget - len(ready) - kept_back
        for sequence in ready:
            if sequence.state is not State.RUNNING:
                continue  # preempted for one before it
            num_drafts = min(self._max_drafts(sequence), max(0, spare_rows))
            if num_drafts and not self._grow(sequence, 1 + num_drafts):
                num_drafts = 0
            if not num_drafts and not (self._grow(sequence, 1) or self._grow_or_preempt(sequence)):
                continue
            spare_rows -= num_drafts
            draft.add(self._item(sequence, 1, is_sampled=True, max_drafts=num_drafts))

    def _max_drafts(self, sequence: Sequence) -> int:
        most = self._config.max_draft_tokens if sequence.spec.drafting else 0
        if sequence.spec.has_grammar:  # it forces tokens, whether or not somebody guesses
            most = self._config.max_span_tokens
        if not most:
            return 0
        num_after = computed_high(sequence) + 2  # known tokens after this step without drafts
        left = min(
            sequence.max_total - computed_low(sequence) - 2,
            sequence.credit - (num_after - sequence.num_prompt),
        )
        return max(0, min(most, left))

    def _grow(self, sequence: Sequence, num_rows: int) -> bool:
        """Blocks for `num_rows` more tokens than steps in flight may need at most."""
        num_tokens = computed_high(sequence) + num_rows
        if num_tokens >= sequence.max_total:
            num_tokens = sequence.max_total - 1
        missing = -(-num_tokens // self._config.block_size) - len(sequence.block_ids)
        if missing <= 0:
            return True
        fresh = self._table.pool.allocate(missing)
        while fresh is None and self._table.holds.give_up_one():
            fresh = self._table.pool.allocate(missing)
        if fresh is None:
            return False
        sequence.block_ids += fresh
        return True

    def _grow_or_preempt(self, sequence: Sequence) -> bool:
        while not self._grow(sequence, 1):
            victim = self._victim(sequence)
            if victim is None:
                return False  # it keeps its blocks and is skipped until others give theirs back
            self._table.preempt(victim)
        return True

    def _victim(self, requester: Sequence) -> Sequence | None:
        """Whose blocks to take: out of credit, then younger and running, then not yet running.

        Sequences of mode prefill end and are released by themselves; reserved ones are awaited.
        """
        others = [s for s in self._table.running if s.spec.mode != "prefill" and s is not requester]
        for candidates in (
            [s for s in others if s.is_decoding and not has_credit(s)],
            [s for s in others if s.order > requester.order],
            [s for s in self._table.waiting if s.block_ids],
        ):
            if candidates:
                return candidates[-1]
        return None

    # -- prompts

    def _plan_chunks(self, draft: _Draft) -> None:
        for sequence in self._table.running:
            if draft.budget <= 0:
                return
            if not sequence.is_decoding:
                num_rows, is_sampled = _next_chunk(sequence, draft.budget, self._cut(sequence))
                if num_rows > 0:
                    draft.add(self._item(sequence, num_rows, is_sampled=is_sampled))

    def _admit(self, draft: _Draft) -> None:
        is_full = False
        coming: set[bytes] | None = None
        for sequence in list(self._table.waiting):
            if draft.budget <= 0 or not self._table.free_slots:
                return
            if sequence.in_flight or (sequence.num_completion and not has_credit(sequence)):
                continue
            if not sequence.block_ids and not is_full:
                coming = self._coming() if coming is None else coming
                if coming and self._is_worth_waiting(sequence, coming):
                    continue
            if not sequence.block_ids and (is_full or not self._make_room(sequence)):
                # Nobody overtakes it to new blocks; but one that owns its blocks must go on, for
                # they may be the very ones that are missing.
                is_full = True
                continue
            if sequence.spec.mode == "prefill" and sequence.num_computed >= sequence.target:
                self._hold(sequence)
                continue
            num_rows, is_sampled = _next_chunk(sequence, draft.budget, self._cut(sequence))
            if num_rows <= 0:
                continue  # only its mask or credit is missing; it keeps its blocks and its place
            self._table.enter_slot(sequence)
            init = _slot_init(sequence)
            draft.add(self._item(sequence, num_rows, is_sampled=is_sampled, init=init))
            if coming is not None:
                coming.update(self._table.unregistered_hashes(sequence))

    def _coming(self) -> set[bytes]:
        """Hashes of prompt blocks that running sequences compute now, or will."""
        coming: set[bytes] = set()
        for sequence in self._table.running:
            if sequence.num_computed < sequence.num_prompt + sequence.spec.completion.size:
                coming.update(self._table.unregistered_hashes(sequence))
        return coming

    def _is_worth_waiting(self, sequence: Sequence, coming: set[bytes]) -> bool:
        """Will much of this prompt lie in the cache soon, behind what lies there already?"""
        num_hits = len(self._table.match_prefix(sequence))
        size = self._config.block_size
        last = num_hits + -(-MIN_SHARED_TOKENS // size)
        if last > (sequence.num_tokens - 1) // size:
            return False
        return self._table.block_hash(sequence, last - 1) in coming

    def _make_room(self, sequence: Sequence) -> bool:
        """Blocks for all its known tokens; a spare one, lest it be preempted at once."""
        if not sequence.target:
            return True
        while not self._table.take_blocks(
            sequence, sequence.target, int(bool(self._table.running))
        ):
            idle = [
                s
                for s in self._table.running
                if s.is_decoding and not s.in_flight and not has_credit(s)
            ]
            if not idle:
                return False
            self._table.preempt(idle[-1])
        return True

    def _hold(self, sequence: Sequence) -> None:
        self._table.waiting.remove(sequence)
        sequence.state = State.HELD
        self.held.append(sequence)

    # -- items

    def _cut(self, sequence: Sequence) -> int:
        """Where the state is copied before its prompt goes on; 0: nowhere."""
        states = self._states
        return states.cut(sequence) if states and self._config.prefix_caching else 0

    def _capture(self, sequence: Sequence, num_rows: int) -> CaptureKind:
        """Whether a step of so many rows leaves a snapshot; asked before it is planned."""
        if sequence.is_decoding:
            return "block" if self._config.prefix_caching else ""
        end = computed_low(sequence) + num_rows
        if sequence.spec.mode == "prefill" and end == sequence.target:
            return "end"
        return "block" if end == self._cut(sequence) else ""

    def _item(
        self,
        sequence: Sequence,
        num_rows: int,
        *,
        is_sampled: bool,
        max_drafts: int = 0,
        init: SlotInit | None = None,
    ) -> PlanItem:
        new_block_ids: tuple[int, ...] = ()
        if sequence.num_sent_blocks < len(sequence.block_ids):
            new_block_ids = tuple(sequence.block_ids[sequence.num_sent_blocks :])
            sequence.num_sent_blocks = len(sequence.block_ids)
        capture: CaptureKind = ""
        state = None
        if self._states is not None:
            capture = self._capture(sequence, num_rows)
        if init is not None:  # from here on its state is that of the slot
            state, sequence.start_state, sequence.given_state = sequence.start_state, None, None
        is_chunk = not sequence.is_decoding
        sequence.is_decoding = sequence.is_decoding or is_sampled
        mask = sequence.mask if is_sampled and is_chunk and sequence.spec.has_grammar else None
        return PlanItem(
            sequence=sequence,
            slot=sequence.slot,
            incarnation=sequence.incarnation,
            num_rows=num_rows,
            is_sampled=is_sampled,
            is_chunk=is_chunk,
            max_drafts=max_drafts,
            init=init,
            new_block_ids=new_block_ids,
            bitmask=mask[1] if mask else None,
            state=state,
            capture=capture,
            arrival=self._arrival(sequence),
        )

    def _arrival(self, sequence: Sequence) -> Arrival | None:
        """Only its first step waits: what is planned behind that runs behind it."""
        if sequence.arriving is None or sequence.in_flight:
            return None
        return sequence.arriving.arrival
