"""What one forward pass computes: flattened rows of many sequences, and where their KV lies."""

from dataclasses import dataclass

import torch

from finback.shared.models.layer_gate import LayerGate
from finback.shared.models.state_slots import StateSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBatch:
    """The state of a step's sequences. slots: [S] int64, where each one's lies in `pool`.

    floors: [S] int64, the first position that windows may look at. stored_rows: int64, the rows whose
    block KV is to be written; None: all. The others compute a prefix again whose blocks are there
    (a replay): what they attend to is what the blocks hold, and the blocks stay as they are.
    """

    pool: StateSlots
    slots: torch.Tensor
    floors: torch.Tensor
    stored_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T rows of S sequences; a sequence's rows are neighbours and consecutive in position.

    token_ids: [T] int32 or int64. positions: [T] int32, absolute. slot_mapping: [T] int32, block_id *
    block_size + offset, where each row's KV is written. block_tables: [S, max_blocks] int32.
    cu_seqlens: [S + 1] int32, rows per sequence, cumulative. context_lens: [S] int32, tokens in KV
    with this step's rows (so the last row's position + 1). max_q, max_context: the largest of them.
    logit_rows: [R] int64, rows whose hidden state leaves the model. state: of models that have some.
    gate: what to wait for on the way through the layers; None: all KV is there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    max_q: int
    max_context: int
    logit_rows: torch.Tensor
    state: StateBatch | None = None
    gate: LayerGate | None = None

    @property
    def num_rows(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        """S."""
        return self.context_lens.shape[0]
