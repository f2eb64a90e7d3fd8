"""Ragged causal attention over paged KV in Triton: a program a (tile of one sequence's rows, head).

Tiles are laid out without asking the host: sequence s begins at tile cu_seqlens[s] // ROWS + s, so
T // ROWS + S programs are enough, and each finds its sequence by bisection. The softmax is the online
one (Milakov and Gimelshein, 2018); tiles wholly in the past need no mask.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.triton_launch import has_dependent_launch

_LOG2_E = 1.4426950408889634


@triton.jit
def _tiles(
    q, high, total, mixed, begin, end, row_positions, context_len, scale, table_ptr, k_ptr, v_ptr,
    stride_block, stride_token, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to the context's tiles [begin, end)."""
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    for tile in range(begin, end):
        first = tile * TILE
        inside = first + tokens < context_len
        if TILE > BLOCK_SIZE:
            places = table_ptr + (first + tokens) // BLOCK_SIZE
            block = tl.load(places, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + first // BLOCK_SIZE).to(tl.int64)
        token_at = block * stride_block + ((first + tokens) % BLOCK_SIZE) * stride_token
        if MASKED:
            k = tl.load(k_ptr + token_at[None, :] + dims[:, None], mask=inside[None, :], other=0.0)
        else:
            k = tl.load(k_ptr + token_at[None, :] + dims[:, None])
        score = tl.dot(q, k) * scale
        if MASKED:
            seen = (first + tokens)[None, :] <= row_positions[:, None]
            score = tl.where(seen, score, float("-inf"))
        new_high = tl.maximum(high, tl.max(score, axis=1))
        shrink = tl.exp2(high - new_high)
        weight = tl.exp2(score - new_high[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        if MASKED:
            v = tl.load(v_ptr + token_at[:, None] + dims[None, :], mask=inside[:, None], other=0.0)
        else:
            v = tl.load(v_ptr + token_at[:, None] + dims[None, :])
        mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None])
        high = new_high
    return high, total, mixed


# These change with every batch, and no launch may find its kernel not compiled yet.
@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, cu_ptr, context_ptr, out_ptr, num_seqs, scale, stride_table,
    stride_block, stride_token,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head of one sequence."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    index = tl.program_id(1)
    head = tl.program_id(0)
    low = tl.full([], 0, dtype=tl.int32)
    high_seq = low + num_seqs
    while high_seq - low > 1:
        middle = (low + high_seq) // 2
        if tl.load(cu_ptr + middle) // ROWS + middle <= index:
            low = middle
        else:
            high_seq = middle
    first_row = tl.load(cu_ptr + low)
    num_rows = tl.load(cu_ptr + low + 1) - first_row
    start = (index - (first_row // ROWS + low)) * ROWS
    if start < num_rows:
        context_len = tl.load(context_ptr + low)
        rows = start + tl.arange(0, ROWS)
        dims = tl.arange(0, HEAD_DIM)
        is_row = rows < num_rows
        where = ((first_row + rows).to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM
        q = tl.load(q_ptr + where + dims[None, :], mask=is_row[:, None], other=0.0)
        q = q.to(k_ptr.dtype.element_ty)
        past = context_len - num_rows
        positions = past + tl.minimum(rows, num_rows - 1)
        last = tl.minimum(past + start + ROWS, context_len)
        whole = (past + start + 1) // TILE
        head_at = (head // GROUP) * HEAD_DIM
        table = table_ptr + low.to(tl.int64) * stride_table
        high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        high, total, mixed = _tiles(
            q, high, total, mixed, 0, whole, positions, context_len, scale, table,
            k_ptr + head_at, v_ptr + head_at, stride_block, stride_token,
            ROWS, HEAD_DIM, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
        high, total, mixed = _tiles(
            q, high, total, mixed, whole, tl.cdiv(last, TILE), positions, context_len, scale,
            table, k_ptr + head_at, v_ptr + head_at, stride_block, stride_token,
            ROWS, HEAD_DIM, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
        found = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + where + dims[None, :], found, mask=is_row[:, None])


def paged_attention(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference; blocks are token-major and contiguous. `out`: in any float type."""
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_blocks.shape[1:3]
    if block_size & (block_size - 1) or head_dim & (head_dim - 1):
        raise ValueError(f"blocks of {block_size} tokens and heads of {head_dim} are not supported")
    if out is None:
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    num_seqs = context_lens.shape[0]
    if not num_rows:
        return out
    rows, tile, warps, stages = launch_shape(num_rows, num_seqs)
    pdl = has_dependent_launch(q.device)
    _attend[(num_heads, num_rows // rows + num_seqs)](
        q, k_blocks, v_blocks, block_tables, cu_seqlens, context_lens, out, num_seqs,
        scale * _LOG2_E, block_tables.stride(0), k_blocks.stride(0), k_blocks.stride(1),
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, ROWS=rows, HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size, TILE=tile, PDL=pdl, num_warps=warps, num_stages=stages,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def launch_shape(num_rows: int, num_seqs: int) -> tuple[int, int, int, int]:
    """(rows, tokens of a tile, warps, stages) of a program, by the rows of a sequence on average."""
    average = num_rows // max(num_seqs, 1)
    if average <= 16:
        return 16, 64, 4, 3
    return 64, 64, 4, 2
