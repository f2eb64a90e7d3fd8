"""A device without a model, for the scheduler's tests: real slots, and KV that can be checked.

The "KV" of a position is a digest of the tokens up to it. Sampling reads the whole context through
the block table and refuses a position whose digest is not that of the sequence's own tokens, so a
block that was shared, freed or overwritten wrongly is seen at once. The next token is a function of
the context alone, which `expected_completion` computes the slow way.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from finback.shared.engine.plan import ItemResult, PlanItem, StepPlan
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.engine.slots import SlotTable, StepRows
from finback.shared.engine.stopping import find_stop, stop_ids
from support.state_sim import SimState

VOCAB_SIZE = 11


def digest(tokens: npt.NDArray[np.int32]) -> int:
    """63 bits over a prefix."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def next_token(tokens: npt.NDArray[np.int32], seed: int) -> int:
    """The one token that may follow."""
    return (digest(tokens) ^ seed * 0x9E3779B1) % VOCAB_SIZE


def mask_of(position: int) -> bytes:
    """What stands for the grammar's mask at a completion index here."""
    return position.to_bytes(4, "little", signed=True)


def expected_completion(
    spec: SequenceSpec, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> tuple[list[int], str]:
    """(tokens, finish reason) of a sequence that runs alone, one token at a time."""
    tokens = spec.token_ids
    num_prompt = tokens.size
    limit = min(spec.sampling.max_tokens, max_model_len - num_prompt)
    stops = stop_ids(spec.sampling, eos_token_ids)
    while True:
        token = next_token(tokens, spec.seed)
        stop = find_stop(
            [token],
            num_completion=tokens.size - num_prompt,
            max_completion=limit,
            min_tokens=spec.sampling.min_tokens,
            stops=stops,
        )
        tokens = np.append(tokens, np.int32(token)).astype(np.int32)
        if stop.reason is not None:
            return tokens[num_prompt:].tolist(), stop.reason


class SimRunner:
    """Executes plans in order, as a device thread would."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        state: SimState | None = None,
    ) -> None:
        self.state = state
        self.slots = SlotTable(num_slots, max_model_len, block_size)
        self.block_size = block_size
        self.kv = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self.num_rows = 0

    def execute(self, plan: StepPlan) -> list[ItemResult]:
        """One step; the results in the order of the items."""
        for item in plan.items:
            self.slots.enter(item)
            if item.state is not None:
                self._restore(item)
        rows = self.slots.resolve(plan.items)
        results = [ItemResult(num_computed=0)] * len(plan.items)
        if rows is None:
            return results
        assert rows.token_ids.size <= plan.num_rows
        self.num_rows += rows.token_ids.size
        contexts = self._contexts(rows)
        self._store(rows, contexts)
        cursor = 0
        for index, where in enumerate(rows.active):
            item = plan.items[where]
            drafts = rows.num_drafts[index]
            targets: list[int] = []
            if item.arrival is not None and not item.arrival.wait(item.arrival.num_layers, 0.0):
                # It read what was not there (yet); nothing of that may be kept.
                item.arrival.give_up()
                self.slots.fail(item.slot)
                results[where] = ItemResult(num_computed=0, is_void=True)
                cursor += 1 + drafts if item.is_sampled else 0
                continue
            if item.is_sampled:
                self._check(rows, index, contexts[index])
                end = int(rows.context_lens[index])
                if item.sequence.spec.has_grammar:
                    if not self._has_masks(plan, rows, index):
                        results[where] = ItemResult(num_computed=0, is_late=True)
                        cursor += 1
                        continue
                    first = end - drafts - item.sequence.num_prompt
                    expected = tuple(mask_of(first + row) for row in range(1 + drafts))
                    assert rows.masks[index] == expected
                for row in range(1 + drafts):
                    seen = contexts[index][: end - drafts + row]
                    assert int(rows.sample_positions[cursor]) == seen.size
                    targets.append(next_token(seen, item.sequence.spec.seed))
                    cursor += 1
            before = int(self.slots.computed[item.slot])
            kept = self.slots.accept(item, drafts, targets)
            results[where] = ItemResult(
                num_computed=kept.num_computed,
                token_ids=kept.token_ids,
                num_drafted=drafts,
                states=self._capture(item, before),
            )
        return results

    def _has_masks(self, plan: StepPlan, rows: StepRows, index: int) -> bool:
        """Nobody can bring one meanwhile: a step is a moment here."""
        self.slots.complete_masks(plan.items, rows, 0.0)
        return bool(rows.masks[index])

    def _restore(self, item: PlanItem) -> None:
        assert self.state is not None
        assert item.state is not None
        position, floor = self.state.unpack(item.slot, item.state)
        assert position == self.slots.computed[item.slot]
        self.slots.floor[item.slot] = floor

    def _capture(self, item: PlanItem, before: int) -> tuple[tuple[int, bytes], ...]:
        if self.state is None or not item.capture:
            return ()
        after = position = int(self.slots.computed[item.slot])
        if item.capture == "block":
            position = after // self.block_size * self.block_size
        if position <= before:
            return ()
        floor = int(self.slots.floor[item.slot])
        return ((position, self.state.pack(item.slot, position, floor, after)),)

    def _contexts(self, rows: StepRows) -> list[npt.NDArray[np.int32]]:
        return [
            self.slots.tokens[slot, :length].copy()
            for slot, length in zip(rows.slots, rows.context_lens, strict=True)
        ]

    def _store(self, rows: StepRows, contexts: list[npt.NDArray[np.int32]]) -> None:
        for index, context in enumerate(contexts):
            exact = self._compute_state(rows, index, context)
            num_kept = self.slots.kept[rows.slots[index]]
            first = int(rows.cu_seqlens[index])
            for row in range(first, rows.cu_seqlens[index + 1]):
                position = int(rows.positions[row])
                assert rows.token_ids[row] == context[position]
                if position < num_kept:  # a replay: it is there, and stays as it is
                    assert self.kv[rows.slot_mapping[row]] == digest(context[: position + 1])
                    continue
                assert exact is None or exact[row - first], f"wrong state at position {position}"
                self.kv[rows.slot_mapping[row]] = digest(context[: position + 1])

    def _compute_state(
        self, rows: StepRows, index: int, context: npt.NDArray[np.int32]
    ) -> list[bool] | None:
        if self.state is None:
            return None
        slot, end = int(rows.slots[index]), int(rows.context_lens[index])
        digest_of = lru_cache(maxsize=None)(lambda at: digest(context[: at + 1]))
        floor = int(self.slots.floor[slot])
        return self.state.step(slot, end - int(rows.num_rows[index]), end, floor, digest_of)

    def _check(self, rows: StepRows, index: int, context: npt.NDArray[np.int32]) -> None:
        for position in range(context.size):
            block = int(rows.block_tables[index, position // self.block_size])
            stored = self.kv[block * self.block_size + position % self.block_size]
            assert stored == digest(context[: position + 1]), f"wrong KV at position {position}"
