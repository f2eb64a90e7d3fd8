"""Which decoding sequences begin with the same KV blocks, so that those are read once. Pure."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from finback.shared.engine.slots import Int32, Int64

# With less in common, the kernel that reads it once takes longer than it saves.
MIN_SHARED_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGroups:
    """`start_blocks` [S]: leading blocks that a sequence shares. `chunks`: (blocks, sequences)."""

    start_blocks: Int32
    chunks: tuple[tuple[int, tuple[int, ...]], ...]


def find_groups(
    block_tables: Int32, context_lens: Int64, block_size: int, num_members: int
) -> PrefixGroups | None:
    """Groups of S sequences in chunks of 2 to `num_members`; None if nothing is worth sharing.

    block_tables: [S, W]. A shared block lies wholly before a sequence's last token. Sequences of a
    group share what all of them have in common with its first.
    """
    least = -(-MIN_SHARED_TOKENS // block_size)
    if block_tables.shape[1] < least or num_members < 2:
        return None
    whole = (context_lens - 1) // block_size
    groups: dict[int, list[int]] = {}
    for row in np.flatnonzero(whole >= least).tolist():
        groups.setdefault(int(block_tables[row, least - 1]), []).append(row)
    start_blocks = np.zeros(context_lens.size, dtype=np.int32)
    chunks: list[tuple[int, tuple[int, ...]]] = []
    for rows in groups.values():
        if len(rows) < 2:
            continue
        most = int(whole[rows].min())
        is_same = (block_tables[rows, :most] == block_tables[rows[0], :most]).all(axis=0)
        num_blocks = most if is_same.all() else int(np.argmin(is_same))
        if num_blocks < least:
            continue
        for start in range(0, len(rows), num_members):
            some = rows[start : start + num_members]
            if len(some) > 1:
                chunks.append((num_blocks, tuple(some)))
                start_blocks[some] = num_blocks
    return PrefixGroups(start_blocks=start_blocks, chunks=tuple(chunks)) if chunks else None
