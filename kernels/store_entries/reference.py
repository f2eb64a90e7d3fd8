"""Compressed entries pooled from state rows, normed, turned and stored; plain torch."""

import torch

from finback.kernels.compress_entries.reference import compress_entries
from finback.kernels.norm_rotary_pairs.reference import norm_rotary_pairs


def store_entries(
    contents: torch.Tensor,
    gates: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    table: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    overlap: bool,
) -> None:
    """Entry e of rows int32 [E, R] (see `compress_entries`) goes to row targets[e] of `table` [M, C];
    a target of -1 is no entry. weight [C]; cos, sin float32 [E, r] of the entries' first tokens.
    """
    real = (targets >= 0).nonzero().flatten()
    pooled = compress_entries(contents, gates, rows[real], overlap=overlap).to(table.dtype)
    turned = norm_rotary_pairs(pooled[:, None], cos[real], sin[real], eps=eps, weight=weight)
    table[targets[real].long()] = turned[:, 0]
