"""Executes plans on the device: rows in, tokens out. Lives on the device thread.

The engine's thread calls `execute`, `pack_block` and `unpack_block`, one at a time and in order;
only `slots.offer_draft` is called from elsewhere. `resident_runner` is the one for devices that compute
by themselves.
"""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from finback.shared.clock import monotonic_s
from finback.shared.engine.arrival import StepGate
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.device import Device
from finback.shared.engine.device_thread import Pending
from finback.shared.engine.mask_shelf import MASK_WAIT_S
from finback.shared.engine.plan import ItemResult, PlanItem, StepPlan, StepResult
from finback.shared.engine.sampling_state import Sampled, SamplingState
from finback.shared.engine.sizing import EngineSizes
from finback.shared.engine.slots import Int32, Int64, SlotTable, StepRows
from finback.shared.errors import InvariantViolated
from finback.shared.models.batch import ForwardBatch, StateBatch
from finback.shared.models.causal_lm import StatefulLM

if TYPE_CHECKING:
    from finback.shared.models.causal_lm import CausalLM
    from finback.shared.models.state_slots import StateSlots

_NOT_FINITE = "the model's logits are not finite"
_SKIPPED = ItemResult(num_computed=0)


class Runner:
    """The model, its KV pool and the state of every slot.

    `depth`: most plans that may wait here at once. `launches`: `execute` may return before the device
    is done.
    """

    depth: ClassVar[int] = 2
    launches: ClassVar[bool] = False

    def __init__(
        self, model: "CausalLM", sizes: EngineSizes, config: EngineConfig, device: Device
    ) -> None:
        self._model = model
        self._device = device
        self._block_size = config.block_size
        self._pool = model.new_pool(
            sizes.memory.num_blocks, config.block_size, sizes.geometry.kv_dtype
        )
        self.slots = SlotTable(config.max_num_seqs, sizes.memory.max_model_len, config.block_size)
        self._sampling = SamplingState(config.max_num_seqs, sizes.vocab_size, device, config.mode)
        self._states: StateSlots | None = None
        if isinstance(model, StatefulLM):
            self._states = model.new_state(
                config.max_num_seqs, sizes.rollback_tokens, sizes.geometry.kv_dtype
            )

    @property
    def bitmask_bytes(self) -> int:
        """Bytes of a grammar's token bitmask."""
        return self._sampling.bitmask_bytes

    def prepare(self) -> None:
        """Get ready for steps of all sizes; on the device thread, before any other call."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | Pending[StepResult]:
        """Run one step."""
        started = monotonic_s()
        for item in plan.items:
            self.slots.enter(item)
            if item.init is not None:
                self._sampling.enter(item.slot, item.init)
                if item.state is not None:
                    self._restore(item.slot, item.state)
        return self._execute_now(plan, started)

    def _execute_now(self, plan: StepPlan, started: float) -> StepResult:
        rows = self.slots.resolve(plan.items)
        items = [_SKIPPED] * len(plan.items)
        if rows is not None:
            self._run(plan.items, rows, items)
        return StepResult(
            step=plan.step,
            items=tuple(items),
            num_rows=0 if rows is None else int(rows.token_ids.size),
            started_s=started,
            duration_ms=1e3 * (monotonic_s() - started),
        )

    @torch.inference_mode()
    def warm_up(self, num_rows: int) -> float:
        """Run a step of `num_rows` (at most a block) through free block 0; milliseconds it took.

        For the first request this loads code and pages; its sequence is nobody's.
        """
        started = monotonic_s()
        tensor = self._device.tensor
        rows = np.arange(num_rows, dtype=np.int32)
        batch = ForwardBatch(
            token_ids=tensor(np.zeros_like(rows)),
            positions=tensor(rows),
            slot_mapping=tensor(rows),
            block_tables=tensor(np.zeros((1, 1), dtype=np.int32)),
            cu_seqlens=tensor(np.array([0, num_rows], dtype=np.int32)),
            context_lens=tensor(np.array([num_rows], dtype=np.int32)),
            max_q=num_rows,
            max_context=num_rows,
            logit_rows=tensor(np.array([num_rows - 1])),
            state=self._state_batch(np.zeros(1, dtype=np.int64), rows, np.array([num_rows])),
        )
        self._sampling.warm_up(self._model.logits(self._model.forward(batch, self._pool)))
        return 1e3 * (monotonic_s() - started)

    def _run(self, items: tuple[PlanItem, ...], rows: StepRows, out: list[ItemResult]) -> None:
        gate = self._gate(items, rows)
        logits = self._logits(rows, gate)
        sampled = None
        if rows.logit_rows.size:
            self.slots.complete_masks(items, rows, monotonic_s() + MASK_WAIT_S)
            masks = self._masks(items, rows)
            sampled = self._sampling.sample(logits, rows, self.slots, masks)
        cursor = 0
        for index, where in enumerate(rows.active):
            item, num_drafts = items[where], rows.num_drafts[index]
            before = int(self.slots.computed[item.slot])
            if gate is not None and item.arrival in gate.lacking:
                self.slots.fail(item.slot)
                out[where] = ItemResult(num_computed=0, is_void=True)
                cursor += 1 + num_drafts if item.is_sampled else 0
            elif sampled is None or not item.is_sampled:
                out[where] = self._computed(item)
            elif item.sequence.spec.has_grammar and not rows.masks[index]:
                out[where] = ItemResult(num_computed=0, is_late=True)
                cursor += 1
            else:
                out[where] = self._accept(item, num_drafts, sampled, cursor)
                cursor += 1 + num_drafts
            if item.capture and not out[where].is_void:
                out[where].states = self._capture(item, before)

    def _gate(self, items: tuple[PlanItem, ...], rows: StepRows) -> StepGate | None:
        """What the step waits for on its way through the layers."""
        arrivals = [items[where].arrival for where in rows.active]
        there = [arrival for arrival in arrivals if arrival is not None]
        return StepGate(there) if there else None

    def _logits(self, rows: StepRows, gate: StepGate | None = None) -> torch.Tensor:
        hidden = self._model.forward(self._batch(rows, gate), self._pool)
        return self._model.logits(hidden) if rows.logit_rows.size else hidden

    def _computed(self, item: PlanItem) -> ItemResult:
        return ItemResult(num_computed=self.slots.accept(item, 0, ()).num_computed)

    def _accept(self, item: PlanItem, num_drafts: int, sampled: Sampled, cursor: int) -> ItemResult:
        end = cursor + 1 + num_drafts
        if not all(sampled.is_finite[cursor:end]):
            self.slots.fail(item.slot)
            return ItemResult(num_computed=0, error=_NOT_FINITE)
        kept = self.slots.accept(item, num_drafts, sampled.token_ids[cursor:end])
        self._sampling.count(item.slot, kept.token_ids)
        logprobs = None
        if sampled.logprobs is not None and self._sampling.wants_logprobs(item.slot):
            logprobs = tuple(
                self._sampling.logprob(item.slot, sampled.logprobs, row)
                for row in range(cursor, cursor + len(kept.token_ids))
            )
        return ItemResult(
            num_computed=kept.num_computed,
            token_ids=kept.token_ids,
            logprobs=logprobs,
            num_drafted=num_drafts,
        )

    def _batch(self, rows: StepRows, gate: StepGate | None = None) -> ForwardBatch:
        tensor = self._device.tensor
        return ForwardBatch(
            token_ids=tensor(rows.token_ids),
            positions=tensor(rows.positions),
            slot_mapping=tensor(rows.slot_mapping),
            block_tables=tensor(rows.block_tables),
            cu_seqlens=tensor(rows.cu_seqlens),
            context_lens=tensor(rows.context_lens),
            max_q=int(rows.num_rows.max()),
            max_context=int(rows.context_lens.max()),
            logit_rows=tensor(rows.logit_rows),
            state=self._state_batch(rows.slots, rows.positions, rows.num_rows),
            gate=gate,
        )

    # -- state slots

    def _state_batch(self, slots: Int64, positions: Int32, num_rows: Int64) -> StateBatch | None:
        if self._states is None:
            return None
        tensor, kept = self._device.tensor, self.slots.kept[slots]
        is_stored = positions >= np.repeat(kept, num_rows)
        return StateBatch(
            pool=self._states,
            slots=tensor(slots),
            floors=tensor(self.slots.floor[slots]),
            stored_rows=None if is_stored.all() else tensor(np.flatnonzero(is_stored)),
        )

    def _restore(self, slot: int, payload: bytes) -> None:
        """Begin with a snapshot; it says itself where its windows begin."""
        if self._states is None:
            raise InvariantViolated("a model without state was given some")
        header = self._states.unpack(slot, payload)
        if header.position != self.slots.computed[slot]:
            raise InvariantViolated(
                f"a state at {header.position} for a sequence at {self.slots.computed[slot]}"
            )
        self.slots.floor[slot] = header.floor

    def _capture(self, item: PlanItem, before: int) -> tuple[tuple[int, bytes], ...]:
        """The snapshot that this item asks for, if its step came to where one is taken."""
        slot, size = item.slot, self._block_size
        after = position = int(self.slots.computed[slot])
        if item.capture == "block":
            position = after // size * size
        if self._states is None or position <= before:
            return ()
        floor = int(self.slots.floor[slot])
        return ((position, self._states.pack(slot, position, floor, after)),)

    def _masks(self, items: tuple[PlanItem, ...], rows: StepRows) -> dict[int, bytes]:
        """Bitmasks by sampled row."""
        masks: dict[int, bytes] = {}
        cursor = 0
        for index, where in enumerate(rows.active):
            if items[where].is_sampled:
                masks.update(enumerate(rows.masks[index], cursor))
                cursor += 1 + rows.num_drafts[index]
        return masks

    def pack_block(self, block_id: int, num_tokens: int, out: memoryview) -> None:
        """Write the first tokens of a block in the host layout."""
        if self._device.name == "cpu":
            self._pool.pack_block(block_id, num_tokens, out)
            return
        self._device.copy_out(self._pool.gather_block(block_id, num_tokens), out)

    def unpack_block(self, block_id: int, num_tokens: int, data: memoryview) -> None:
        """Read the first tokens of a block from the host layout."""
        if self._device.name == "cpu":
            self._pool.unpack_block(block_id, num_tokens, data)
            return
        packed = self._pool.empty_block(num_tokens)
        self._device.copy_in(data, packed)
        self._pool.scatter_block(block_id, num_tokens, packed)

    @property
    def waits_for_layers(self) -> bool:
        """May blocks come layer by layer, while a step computes behind them?"""
        return self._device.name == "cpu" and bool(getattr(self._model, "waits_for_layers", False))

    def put_layers(self, block_id: int, first: int, end: int, data: memoryview) -> None:
        """Some layers of a full block from the host layout; from any thread, beside everything else."""
        self._pool.unpack_layers(block_id, first, end, data)

    def touch_blocks(self, first: int, end: int) -> bool:
        """Make their memory ready; from any thread, beside everything else."""
        return self._pool.touch(first, end)

    def close(self) -> None:
        """Release the model's threads and memory; no call may follow."""
        self._device.close()
        self._model.close()
