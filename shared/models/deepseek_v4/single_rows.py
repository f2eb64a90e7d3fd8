"""A step row by row, for arithmetic that must not depend on the company of a row."""

from collections.abc import Iterator

import torch

from finback.shared.models.deepseek_v4.batch import V4Batch


def single_rows(batch: V4Batch) -> Iterator[tuple[int, V4Batch]]:
    """(row, a step of that row alone), in order; a sequence's rows are in order of position."""
    first = torch.tensor([0])
    for row in range(batch.num_tokens):
        one = batch.sequence[row : row + 1]
        position = batch.positions[row : row + 1]
        yield (
            row,
            V4Batch(
                token_ids=batch.token_ids[row : row + 1],
                starts=position,
                lengths=torch.ones_like(position),
                slots=batch.slots[one],
                block_tables=batch.block_tables[one],
                logit_rows=first,
                replay_starts=batch.replay_starts[one],
                entries_from=torch.maximum(batch.entries_from[one], position),
            ),
        )
