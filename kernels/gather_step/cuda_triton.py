"""Gathering a step's rows in Triton: a program a row.

It never lets a dependent kernel start early: kernels further down a chain read lengths and block
tables before they wait, and rely on both being written by then.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl

from finback.kernels.gather_step import SlotTensors, StepInputs

_BLOCK = 128


@triton.jit
def _row(
    rows_ptr, last_token_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    table_ptr, token_out, context_out, position_out, seed_out, temperature_out, top_k_out,
    top_p_out, min_p_out, table_out, width, BLOCK_SIZE: tl.constexpr, HAS_TABLES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + 2 * row).to(tl.int64)
    context_len = tl.load(rows_ptr + 2 * row + 1)
    is_live = context_len > 0
    tl.store(token_out + row, tl.load(last_token_ptr + slot, mask=is_live, other=0))
    tl.store(context_out + row, context_len)
    tl.store(position_out + row, context_len.to(tl.int64))
    tl.store(seed_out + row, tl.load(seed_ptr + slot, mask=is_live, other=0))
    tl.store(temperature_out + row, tl.load(temperature_ptr + slot, mask=is_live, other=0.0))
    tl.store(top_k_out + row, tl.load(top_k_ptr + slot, mask=is_live, other=0))
    tl.store(top_p_out + row, tl.load(top_p_ptr + slot, mask=is_live, other=0.0))
    tl.store(min_p_out + row, tl.load(min_p_ptr + slot, mask=is_live, other=0.0))
    if HAS_TABLES:
        count = tl.cdiv(context_len, BLOCK_SIZE)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            block = tl.load(table_ptr + slot * width + at, mask=at < count, other=0)
            tl.store(table_out + row * width + at, block, mask=at < count)


def gather_step(slots: SlotTensors, rows: torch.Tensor, block_size: int, out: StepInputs) -> None:
    """See the package's docstring; `out` is written."""
    tables = out.block_tables
    if not rows.shape[0]:
        return
    _row[(rows.shape[0],)](
        rows, slots.last_token, slots.seed, slots.temperature, slots.top_k, slots.top_p,
        slots.min_p, slots.block_tables, out.token_ids, out.context_lens, out.position, out.seed,
        out.temperature, out.top_k, out.top_p, out.min_p,
        slots.block_tables if tables is None else tables, slots.block_tables.shape[1],
        BLOCK_SIZE=block_size, HAS_TABLES=tables is not None, BLOCK=_BLOCK, num_warps=1,
    )  # fmt: skip
