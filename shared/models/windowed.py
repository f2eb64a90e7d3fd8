"""The network whose layers partly see a sliding window only: block KV and state side by side.

Layers with the whole context keep their keys and values in blocks, the others in a ring per
sequence. In deterministic mode every row goes through the network alone, in the order of its position: its
bits depend on its context, not on chunks and company. That is slow, and exact.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch

from finback.shared.kv.state import StateSpec
from finback.shared.models.batch import ForwardBatch, StateBatch
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.state_slots import StateSlots
from finback.shared.models.transformer import Transformer
from finback.shared.models.window_state import WINDOW_PART, window_state


class WindowedTransformer(Transformer):
    """A `StatefulLM`; the batch of every call names the state of its sequences."""

    waits_for_layers: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        windowed, full = self.config.window_layers, 0
        self._places: list[tuple[bool, int]] = []
        for layer in range(self.config.num_layers):
            is_windowed = layer in windowed
            self._places.append((is_windowed, layer - full if is_windowed else full))
            full += not is_windowed
        self.numerics = f"window-{self.numerics}"

    def state_spec(self, kv_dtype: str = "auto") -> StateSpec:
        """See `StatefulLM`."""
        dtype = self.default_kv_dtype if kv_dtype == "auto" else kv_dtype
        return window_state(self.config, dtype)

    def new_state(self, num_slots: int, rollback_tokens: int, kv_dtype: str = "auto") -> StateSlots:
        """See `StatefulLM`."""
        return StateSlots(
            self.state_spec(kv_dtype),
            num_slots=num_slots,
            rollback_tokens=rollback_tokens,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """See `CausalLM`."""
        if self.mode != "deterministic" or batch.num_rows == 1:
            return super().forward(batch, kv)
        wanted = set(batch.logit_rows.tolist())
        found = {}
        for row, single in enumerate(_single_rows(batch)):
            hidden = super().forward(single, kv)
            if row in wanted:
                found[row] = hidden
        size = (0, self.config.hidden_size)
        rows = [found[row] for row in batch.logit_rows.tolist()]
        return torch.cat(rows) if rows else torch.empty(size, device=self.device)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        if self.mode != "deterministic":
            return super().logits(hidden)
        rows = [super(WindowedTransformer, self).logits(row) for row in hidden[:, None]]
        return torch.cat(rows)

    def _mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        index: int,
    ) -> torch.Tensor:
        state = _state_of(batch)
        is_windowed, place = self._places[index]
        if is_windowed:
            return self._mix_window(q, k, v, batch, state, place)
        if state.stored_rows is None:
            return super()._mix(q, k, v, batch, kv, place)
        return self._mix_replay(q, k, v, batch, kv, place, state.stored_rows)

    def _mix_window(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        state: StateBatch,
        place: int,
    ) -> torch.Tensor:
        config, where = self.config, (state.slots, batch.cu_seqlens, batch.context_lens)
        ring = state.pool.rows[WINDOW_PART][place]
        mixed: torch.Tensor = self.kernels.window_attention(
            q, k, v, ring, *where, state.floors, config.sliding_window, config.head_dim**-0.5
        )
        self.kernels.store_window(k, v, ring, *where)
        return mixed

    def _mix_replay(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        place: int,
        stored: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to the blocks, of which the replayed rows' own must not be written."""
        k_blocks, v_blocks = kv.token_major(place)
        if stored.numel():
            slots = batch.slot_mapping[stored]
            self.kernels.store_kv(k[stored], v[stored], k_blocks, v_blocks, slots)
        where = (batch.block_tables, batch.cu_seqlens, batch.context_lens)
        mixed: torch.Tensor = self.kernels.paged_attention(
            q, k_blocks, v_blocks, *where, self.config.head_dim**-0.5
        )
        return mixed


def _state_of(batch: ForwardBatch) -> StateBatch:
    if batch.state is None:
        raise ValueError("a model with state needs the state of the batch's sequences")
    return batch.state


def _single_rows(batch: ForwardBatch) -> list[ForwardBatch]:
    """Each row as a batch of its own, in order; all of them leave the model."""
    state = _state_of(batch)
    stored = None if state.stored_rows is None else set(state.stored_rows.tolist())
    starts = batch.cu_seqlens.tolist()
    whole, none = None, torch.empty(0, dtype=torch.int64)
    singles = []
    for seq in range(batch.num_seqs):
        for row in range(starts[seq], starts[seq + 1]):
            position = batch.positions[row : row + 1]
            is_stored = stored is None or row in stored
            singles.append(
                ForwardBatch(
                    token_ids=batch.token_ids[row : row + 1],
                    positions=position,
                    slot_mapping=batch.slot_mapping[row : row + 1],
                    block_tables=batch.block_tables[seq : seq + 1],
                    cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
                    context_lens=position + 1,
                    max_q=1,
                    max_context=batch.max_context,
                    logit_rows=torch.tensor([0]),
                    state=replace(
                        state,
                        slots=state.slots[seq : seq + 1],
                        floors=state.floors[seq : seq + 1],
                        stored_rows=whole if is_stored else none,
                    ),
                )
            )
    return singles
