"""Splitting a step's rows by the length of their chunk, against plain loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from finback.shared.models.row_classes import split_rows
from support.forward_batches import Chunk, flat_batch

WIDE = 4


def _batch(lengths: list[int], seed: int = 0):  # type: ignore[no-untyped-def]  # a ForwardBatch
    rng = np.random.default_rng(seed)
    chunks = [
        Chunk(
            token_ids=rng.integers(0, 99, length).tolist(),
            first=int(rng.integers(0, 9)),
            blocks=[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3],
        )
        for i, length in enumerate(lengths)
    ]
    return flat_batch(chunks, 16)


@pytest.mark.parametrize("lengths", [[1, 1, 3], [4], [9, 4]])
def test_one_kind_is_the_step_itself(lengths: list[int]) -> None:
    batch = _batch(lengths)
    (part,) = split_rows(batch, WIDE)
    assert part.batch is batch
    assert part.outputs is None
    assert part.is_wide == (lengths[0] >= WIDE)


@pytest.mark.parametrize("seed", range(6))
def test_parts_hold_every_row_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [1, 7, *rng.integers(1, 8, int(rng.integers(0, 7))).tolist()]
    rng.shuffle(lengths)
    batch = _batch(lengths, seed)
    batch = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "logit_rows"},
        logit_rows=torch.from_numpy(np.flatnonzero(rng.random(batch.num_rows) < 0.6)),
    )
    rows = {}
    wanted = torch.zeros(len(batch.logit_rows), dtype=torch.int64)
    for part in split_rows(batch, WIDE):
        assert part.outputs is not None
        starts = part.batch.cu_seqlens.tolist()
        for seq, (start, end) in enumerate(pairwise(starts)):
            assert part.is_wide == (end - start >= WIDE)
            table = tuple(part.batch.block_tables[seq].tolist())
            for row in range(start, end):
                token = int(part.batch.token_ids[row])
                position = int(part.batch.positions[row])
                rows[table, position] = (token, int(part.batch.slot_mapping[row]))
            assert int(part.batch.context_lens[seq]) == int(part.batch.positions[end - 1]) + 1
        assert part.batch.max_context == int(part.batch.context_lens.max())
        wanted[part.outputs] = part.batch.token_ids[part.batch.logit_rows].long()
    assert len(rows) == batch.num_rows
    starts = batch.cu_seqlens.tolist()
    for seq, (start, end) in enumerate(pairwise(starts)):
        for row in range(start, end):
            key = (tuple(batch.block_tables[seq].tolist()), int(batch.positions[row]))
            assert rows[key] == (int(batch.token_ids[row]), int(batch.slot_mapping[row]))
    assert wanted.tolist() == batch.token_ids[batch.logit_rows].tolist()
