"""The device side's own state of every running sequence, and the rows of a step.

The planner names slots; tokens, lengths and drafts are resolved here, from what the step before
left, so that no plan waits for a result. On the CPU these are numpy arrays. No torch.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from finback.shared.engine.mask_shelf import MaskShelf, MaskSpan
from finback.shared.engine.plan import PlanItem, SlotInit
from finback.shared.engine.sequence import TokenIds
from finback.shared.engine.stopping import find_stop
from finback.shared.errors import InvariantViolated

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The flattened rows of a step: S items with rows, T rows, R of them sampled from.

    `active`: indexes of those items in the plan. `num_rows` [S] rows of each; `num_drafts` [S] of
    them drafts. `token_ids`, `positions`, `slot_mapping`: [T]. `block_tables`: [S, most blocks].
    `context_lens`: [S], tokens in KV with this step's. `logit_rows`: [R] rows that are sampled
    from, `sample_slots`: [R] their slots, `sample_positions`: [R] absolute positions of the tokens
    to come. `masks`: of each active item, one bitmask a row that is sampled from; empty without a
    grammar, or while they are missing.
    """

    active: list[int]
    slots: Int64
    num_rows: Int64
    num_drafts: list[int]
    token_ids: Int32
    positions: Int32
    slot_mapping: Int32
    block_tables: Int32
    cu_seqlens: Int32
    context_lens: Int32
    logit_rows: Int64
    sample_slots: Int64
    sample_positions: Int64
    masks: list[tuple[bytes, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What one item keeps: tokens whose KV is final, and the new ones."""

    num_computed: int
    token_ids: tuple[int, ...]


class SlotTable:
    """`tokens[slot, :length[slot]]` are known; the KV of the first `computed[slot]` is in the pool.

    While a sequence decodes, length = computed + 1. Draft tokens lie behind the known ones until
    they are accepted or overwritten.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((num_slots, max_model_len), dtype=np.int32)
        self.length = np.zeros(num_slots, dtype=np.int64)
        self.computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.block_tables = np.zeros((num_slots, max_blocks), dtype=np.int32)
        # Of models with state: tokens whose block KV stays as it is, where windows begin at most.
        self.kept = np.zeros(num_slots, dtype=np.int64)
        self.floor = np.zeros(num_slots, dtype=np.int64)
        self._num_blocks = [0] * num_slots
        self._max_total = [0] * num_slots
        self._is_done = [False] * num_slots
        self._inits: list[SlotInit | None] = [None] * num_slots
        self._drafts: dict[int, tuple[int, int, TokenIds]] = {}
        self.shelf = MaskShelf()

    def init(self, slot: int) -> SlotInit:
        """With what a sequence entered this slot."""
        init = self._inits[slot]
        if init is None:
            raise InvariantViolated(f"slot {slot} is empty")
        return init

    def num_blocks(self, slot: int) -> int:
        """Entries of a slot's block table."""
        return self._num_blocks[slot]

    def has_offer(self, slot: int) -> bool:
        """Does a guess lie ready for the next launch?"""
        return slot in self._drafts

    def offer_draft(self, slot: int, incarnation: int, position: int, token_ids: TokenIds) -> None:
        """Leave a guess for the next launch (any thread: one dict store)."""
        self._drafts[slot] = (incarnation, position, token_ids)

    def offer_masks(self, slot: int, span: MaskSpan) -> None:
        """Leave masks, and tokens that they allow, for a launch or for one that runs (any thread)."""
        self.shelf.put(slot, span)

    # -- before the step

    def enter(self, item: PlanItem) -> None:
        """Take over what the planner says of a slot: a new sequence, new blocks."""
        slot = item.slot
        if item.init is not None:
            init = item.init
            size = init.tokens.size
            self.tokens[slot, :size] = init.tokens
            self.length[slot] = size
            self.computed[slot] = init.num_computed
            self.num_prompt[slot] = init.num_prompt
            self.kept[slot] = init.num_kept
            self.floor[slot] = init.num_computed
            self._max_total[slot] = init.max_total
            self._is_done[slot] = False
            self._num_blocks[slot] = 0
            self._inits[slot] = init
        if item.new_block_ids:
            start = self._num_blocks[slot]
            end = start + len(item.new_block_ids)
            self.block_tables[slot, start:end] = item.new_block_ids
            self._num_blocks[slot] = end

    def resolve(self, items: Rows[PlanItem]) -> StepRows | None:
        """Rows of all items; None when every sequence turned out to be complete."""
        active, counts, num_drafts = [], [], []
        masks: list[tuple[bytes, ...]] = []
        for index, item in enumerate(items):
            slot = item.slot
            if self._is_done[slot]:
                continue
            drafts = 0
            known: tuple[bytes, ...] = ()
            if item.is_sampled and item.sequence.spec.has_grammar:
                drafts, known = self._place_span(item)
            elif item.max_drafts:
                drafts = self._place_draft(item)
            masks.append(known)
            active.append(index)
            counts.append(item.num_rows + drafts)
            num_drafts.append(drafts)
        if not active:
            return None
        slots = np.fromiter((items[i].slot for i in active), dtype=np.int64, count=len(active))
        rows = np.array(counts, dtype=np.int64)
        sampled = [items[i].is_sampled for i in active]
        flat = self.flatten(active, slots, rows, num_drafts, sampled, self.computed[slots])
        flat.masks.extend(masks)
        return flat

    def complete_masks(self, items: Rows[PlanItem], rows: StepRows, deadline_s: float) -> None:
        """Fill in masks that were missing at launch; wait for them until `deadline_s`."""
        missing = [
            index
            for index, where in enumerate(rows.active)
            if items[where].is_sampled
            and items[where].sequence.spec.has_grammar
            and not rows.masks[index]
        ]

        def look() -> bool:
            for index in missing:
                if not rows.masks[index]:
                    rows.masks[index] = self._span(items[rows.active[index]])[1][:1]
            return all(rows.masks[index] for index in missing)

        if missing and not look():
            self.shelf.wait(look, deadline_s)

    def flatten(
        self,
        active: list[int],
        slots: Int64,
        rows: Int64,
        num_drafts: list[int],
        sampled: list[bool],
        start: Int64,
    ) -> StepRows:
        """Rows [S] of each slot [S] from position `start` [S] on; their tokens are known here."""
        size = self._block_size
        cu_seqlens = np.zeros(len(active) + 1, dtype=np.int64)
        np.cumsum(rows, out=cu_seqlens[1:])
        row_slots = np.repeat(slots, rows)
        positions = np.arange(cu_seqlens[-1]) + np.repeat(start - cu_seqlens[:-1], rows)
        blocks = self.block_tables[row_slots, positions // size]
        context_lens = start + rows
        most_blocks = -(-int(context_lens.max()) // size)
        # Sampled rows of an item are its last 1 + drafts; a row predicts the position after its own.
        num_sampled = np.where(sampled, np.array(num_drafts) + 1, 0)
        first = cu_seqlens[1:] - num_sampled
        ends = np.cumsum(num_sampled)
        logit_rows = np.arange(ends[-1]) + np.repeat(first - (ends - num_sampled), num_sampled)
        return StepRows(
            active=active,
            slots=slots,
            num_rows=rows,
            num_drafts=num_drafts,
            token_ids=self.tokens[row_slots, positions],
            positions=positions.astype(np.int32),
            slot_mapping=(blocks * size + positions % size).astype(np.int32),
            block_tables=self.block_tables[slots, :most_blocks],
            cu_seqlens=cu_seqlens.astype(np.int32),
            context_lens=context_lens.astype(np.int32),
            logit_rows=logit_rows,
            sample_slots=row_slots[logit_rows],
            sample_positions=positions[logit_rows] + 1,
        )

    def _span(self, item: PlanItem) -> tuple[TokenIds, tuple[bytes, ...]]:
        slot, length = item.slot, int(self.length[item.slot])
        tokens = self.tokens[slot]
        return self.shelf.find(slot, item.sequence, item.incarnation, tokens, length)

    def _place_span(self, item: PlanItem) -> tuple[int, tuple[bytes, ...]]:
        """Drafts that the grammar allows, laid behind the known tokens, and a mask for each row."""
        if item.bitmask is not None:
            return 0, (item.bitmask,)
        token_ids, masks = self._span(item)
        count = min(item.max_drafts, token_ids.size, self._room(item.slot))
        if count <= 0:
            return 0, masks[:1]
        length = int(self.length[item.slot])
        self.tokens[item.slot, length : length + count] = token_ids[:count]
        return count, masks[: count + 1]

    def _room(self, slot: int) -> int:
        """Tokens that may be added before the sequence, or its blocks, are full."""
        most = min(self._max_total[slot] - 1, self._num_blocks[slot] * self._block_size)
        return most - int(self.length[slot])

    def _place_draft(self, item: PlanItem) -> int:
        """Align the guess at hand with what was really sampled; how many drafts lie ready now."""
        slot = item.slot
        offer = self._drafts.get(slot)
        if offer is None:
            return 0
        incarnation, position, token_ids = offer
        length = int(self.length[slot])
        known = length - position
        fits = incarnation == item.incarnation and 0 <= known < token_ids.size
        if not fits or not np.array_equal(token_ids[:known], self.tokens[slot, position:length]):
            self._drafts.pop(slot, None)
            return 0
        count = min(item.max_drafts, token_ids.size - known, self._room(slot))
        if count <= 0:
            return 0
        self.tokens[slot, length : length + count] = token_ids[known : known + count]
        return int(count)

    # -- after the step

    def accept(self, item: PlanItem, num_drafts: int, target_ids: Rows[int]) -> Accepted:
        """Keep what the step computed. `target_ids`: [1 + num_drafts] tokens that the model chose.

        A draft is accepted if and only if it equals the target token of its position, so the text
        is the same as without drafts.
        """
        slot = item.slot
        if not item.is_sampled:
            self.computed[slot] += item.num_rows
            return Accepted(num_computed=item.num_rows, token_ids=())
        length = int(self.length[slot])
        accepted = 0
        while (
            accepted < num_drafts and target_ids[accepted] == self.tokens[slot, length + accepted]
        ):
            accepted += 1
        new = tuple(target_ids[: accepted + 1])
        num_computed = length + accepted - int(self.computed[slot])
        end = length + accepted + 1
        self.tokens[slot, length:end] = new
        self.length[slot] = end
        self.computed[slot] = end - 1
        self._is_done[slot] = self._stops(slot, length, new)
        return Accepted(num_computed=num_computed, token_ids=new)

    def accept_many(self, slots: Int64, num_rows: Int64, token_ids: Int64) -> None:
        """What a step without drafts computed: rows of each slot, and its new token, or -1 for none."""
        self.computed[slots] += num_rows
        has_token = token_ids >= 0
        sampled = slots[has_token]
        self.tokens[sampled, self.length[sampled]] = token_ids[has_token]
        self.length[sampled] += 1

    def fail(self, slot: int) -> None:
        """The sequence in this slot has no valid state any more."""
        self._is_done[slot] = True

    def _stops(self, slot: int, length: int, new: Rows[int]) -> bool:
        """Spare the device the step that the planner may already have planned past the end."""
        init = self.init(slot)
        stop = find_stop(
            new,
            num_completion=length - init.num_prompt,
            max_completion=init.max_total - init.num_prompt,
            min_tokens=init.spec.sampling.min_tokens,
            stops=init.stops,
        )
        return stop.reason is not None
