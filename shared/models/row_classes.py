"""Which rows of a step are computed how: a chunk's own length decides, never its company."""

from dataclasses import dataclass

import numpy as np
import torch

from finback.shared.models.batch import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Sequences of a step that are computed alike.

    `outputs`: where the rows that leave belong among those of the step (int64 [R]); None: the part
    is the whole step.
    """

    batch: ForwardBatch
    is_wide: bool
    outputs: torch.Tensor | None


def split_rows(batch: ForwardBatch, wide_rows: int) -> list[Part]:
    """Sequences with at least `wide_rows` rows in this step, and the others; empty parts are left out."""
    starts = batch.cu_seqlens.numpy()
    is_wide = np.diff(starts) >= wide_rows
    if is_wide.all() or not is_wide.any():
        return [Part(batch=batch, is_wide=bool(is_wide.any()), outputs=None)]
    return [_select(batch, is_wide == kind, bool(kind)) for kind in (False, True)]


def _select(batch: ForwardBatch, chosen: np.ndarray, is_wide: bool) -> Part:
    starts = batch.cu_seqlens.numpy()
    counts = np.diff(starts)
    is_ours = np.repeat(chosen, counts)
    new_rows = np.cumsum(is_ours) - 1
    rows = torch.from_numpy(np.flatnonzero(is_ours))
    wanted = batch.logit_rows.numpy()
    outputs = np.flatnonzero(is_ours[wanted])
    lens = batch.context_lens[torch.from_numpy(chosen)]
    part = ForwardBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        block_tables=batch.block_tables[torch.from_numpy(chosen)],
        cu_seqlens=torch.from_numpy(
            np.concatenate(([0], np.cumsum(counts[chosen]))).astype(np.int32)
        ),
        context_lens=lens,
        max_q=int(counts[chosen].max()),
        max_context=int(lens.max()),
        logit_rows=torch.from_numpy(new_rows[wanted[outputs]]),
        gate=batch.gate,
    )
    return Part(batch=part, is_wide=is_wide, outputs=torch.from_numpy(outputs))
