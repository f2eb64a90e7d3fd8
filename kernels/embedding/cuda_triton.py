"""Rows of the embedding table in Triton, written in any float type.

It begins a step and is never launched before its predecessor has ended, so every kernel after it may
read what earlier steps wrote (lengths, tables, KV) even before its own wait.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl


@triton.jit
def _row(token_ptr, table_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ptr + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(table_ptr + token_id * size + at, mask=at < size, other=0.0)
    tl.store(out_ptr + row * size + at, x.to(out_ptr.dtype.element_ty), mask=at < size)


def embedding(
    token_ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """table[token_ids] as float32, or in `out`'s type: [rows, hidden_size]."""
    size = table.shape[1]
    if out is None:
        out = torch.empty((token_ids.shape[0], size), dtype=torch.float32, device=table.device)
    if token_ids.shape[0]:
        _row[(token_ids.shape[0],)](token_ids, table, out, size, BLOCK=triton.next_power_of_2(size))
    return out
