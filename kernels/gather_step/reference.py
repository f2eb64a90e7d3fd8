"""Gathering a step's rows in plain torch."""

import torch

from finback.kernels.gather_step import SlotTensors, StepInputs


def gather_step(slots: SlotTensors, rows: torch.Tensor, block_size: int, out: StepInputs) -> None:
    """See the package's docstring; `out` is written."""
    slot, context_len = rows[:, 0].long(), rows[:, 1]
    is_live = context_len > 0

    def fetch(source: torch.Tensor) -> torch.Tensor:
        return torch.where(is_live, source[slot], torch.zeros_like(source[slot]))

    out.token_ids.copy_(fetch(slots.last_token))
    out.context_lens.copy_(context_len)
    out.position.copy_(context_len)
    for name in ("seed", "temperature", "top_k", "top_p", "min_p"):
        getattr(out, name).copy_(fetch(getattr(slots, name)))
    if out.block_tables is not None:
        for row in range(rows.shape[0]):
            count = -(-int(context_len[row]) // block_size)
            out.block_tables[row, :count] = slots.block_tables[slot[row], :count]
