"""Fused decode attention in Triton: a program a (sequence, kv head, part of the context).

Every program norms and rotates its few queries itself (cheaper than another kernel); the one with
the context's end makes and stores the new key and value, and takes them from its registers. The last
program of a (sequence, kv head) to arrive joins the parts, so no second kernel is needed
(flash-decoding, Dao et al. 2023, with stream-K's way of finishing).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.decode_attention import DecodeWorkspace
from finback.kernels.rotary_store_kv.cuda_triton import normed_and_rotated
from finback.kernels.triton_launch import has_dependent_launch, num_multiprocessors

_MIN_DOT_ROWS = 16
_LOG2_E = 1.4426950408889634


@triton.jit
def _join_parts(
    part_ptr, out_ptr, num_parts, GROUP: tl.constexpr, GROUP_P2: tl.constexpr,
    HEAD_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out [GROUP, HEAD_DIM] from parts (accumulator, maximum, sum) of this kv head."""
    row: tl.constexpr = HEAD_DIM + 2
    group = tl.arange(0, GROUP_P2)
    splits = tl.arange(0, SPLITS_P2)
    facts = part_ptr + (group[:, None] * NUM_SPLITS + splits[None, :]) * row + HEAD_DIM
    is_part = (group < GROUP)[:, None] & (splits < num_parts)[None, :]
    highs = tl.load(facts, mask=is_part, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(facts + 1, mask=is_part, other=0.0, cache_modifier=".cg")
    high = tl.max(highs, axis=1)
    high = tl.where(group < GROUP, high, 0.0)
    total = tl.sum(sums * tl.exp2(highs - high[:, None]), axis=1)
    total = tl.where(group < GROUP, total, 1.0)
    dims = tl.arange(0, HEAD_DIM)
    mixed = tl.zeros([GROUP_P2, HEAD_DIM], dtype=tl.float32)
    for start in range(0, num_parts, CHUNK):
        some = start + tl.arange(0, CHUNK)
        rows = part_ptr + (group[None, :] * NUM_SPLITS + some[:, None]) * row
        inside = (group < GROUP)[None, :] & (some < num_parts)[:, None]
        weight = tl.load(rows + HEAD_DIM, mask=inside, other=float("-inf"), cache_modifier=".cg")
        weight = tl.exp2(weight - high[None, :])
        values = tl.load(
            rows[:, :, None] + dims[None, None, :], mask=inside[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        mixed += tl.sum(values * weight[:, :, None], axis=0)
    mixed = mixed / total[:, None]
    into = out_ptr + group[:, None] * HEAD_DIM + dims[None, :]
    tl.store(into, mixed.to(out_ptr.dtype.element_ty), mask=(group < GROUP)[:, None])


@triton.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, context_ptr, k_ptr, v_ptr,
    out_ptr, partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block, stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, SPLITS_P2: tl.constexpr, CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one context for one kv head and its GROUP query heads."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    context_len = tl.load(context_ptr + seq)
    num_tiles = tl.cdiv(context_len, TILE)
    per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    if begin < num_tiles:
        position = context_len - 1
        at = tl.arange(0, half)
        dims = tl.arange(0, HEAD_DIM)
        cos = tl.load(cos_ptr + position * half + at)
        sin = tl.load(sin_ptr + position * half + at)
        rows = tl.arange(0, ROWS)
        is_row = rows < GROUP
        row_start = qkv_ptr + seq * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        q1, q2 = normed_and_rotated(
            row_start + kv_head * (GROUP * HEAD_DIM), q_norm_ptr, cos, sin, eps, is_row, ROWS,
            HEAD_DIM, HAS_NORM,
        )  # fmt: skip
        q1 = q1.to(k_ptr.dtype.element_ty)
        q2 = q2.to(k_ptr.dtype.element_ty)
        high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        head_at = kv_head * HEAD_DIM
        if end == num_tiles:
            k_start = row_start + NUM_HEADS * HEAD_DIM + head_at
            one = tl.arange(0, 1)
            k1, k2 = normed_and_rotated(
                k_start, k_norm_ptr, cos, sin, eps, one < 1, 1, HEAD_DIM, HAS_NORM
            )
            k1 = k1.to(k_ptr.dtype.element_ty)
            k2 = k2.to(k_ptr.dtype.element_ty)
            v = tl.load(k_start + NUM_KV_HEADS * HEAD_DIM + dims).to(v_ptr.dtype.element_ty)
            block = tl.load(table_ptr + seq * stride_table + position // BLOCK_SIZE).to(tl.int64)
            into = block * stride_block + (position % BLOCK_SIZE) * stride_token + head_at
            tl.store(k_ptr + into + at[None, :], k1)
            tl.store(k_ptr + into + half + at[None, :], k2)
            tl.store(v_ptr + into + dims, v)
            score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), axis=1)
            score += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), axis=1)
            high = score * scale
            total = tl.full([ROWS], 1.0, dtype=tl.float32)
            mixed = mixed + v.to(tl.float32)[None, :]
        tokens = tl.arange(0, TILE)
        for tile in range(begin, end):
            first = tile * TILE
            block = tl.load(table_ptr + seq * stride_table + first // BLOCK_SIZE).to(tl.int64)
            place = block * stride_block + head_at
            token_at = place + (first % BLOCK_SIZE + tokens)[:, None] * stride_token
            # The last position is the new token's: it came from registers.
            is_old = first + tokens < position
            k1 = tl.load(k_ptr + token_at + at[None, :], mask=is_old[:, None], other=0.0)
            k2 = tl.load(k_ptr + token_at + half + at[None, :], mask=is_old[:, None], other=0.0)
            score = tl.dot(q1, tl.trans(k1))
            score = tl.dot(q2, tl.trans(k2), score)
            score = tl.where(is_old[None, :], score * scale, float("-inf"))
            new_high = tl.maximum(high, tl.max(score, axis=1))
            shrink = tl.exp2(high - new_high)
            weight = tl.exp2(score - new_high[:, None])
            v = tl.load(v_ptr + token_at + dims[None, :], mask=is_old[:, None], other=0.0)
            total = total * shrink + tl.sum(weight, axis=1)
            mixed = mixed * shrink[:, None]
            mixed = tl.dot(weight.to(v.dtype), v, mixed)
            high = new_high
        head = kv_head * GROUP
        out_start = out_ptr + (seq * NUM_HEADS + head) * HEAD_DIM
        num_parts = tl.cdiv(num_tiles, per_split)
        if NUM_SPLITS == 1 or num_parts == 1:
            found = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(
                out_start + rows[:, None] * HEAD_DIM + dims[None, :], found, mask=is_row[:, None]
            )
        else:
            width: tl.constexpr = HEAD_DIM + 2
            part_start = partial_ptr + (seq * NUM_HEADS + head) * (NUM_SPLITS * width)
            mine = part_start + (rows * NUM_SPLITS + split) * width
            tl.store(mine[:, None] + dims[None, :], mixed, mask=is_row[:, None])
            tl.store(mine + HEAD_DIM, high, mask=is_row)
            tl.store(mine + HEAD_DIM + 1, total, mask=is_row)
            tl.debug_barrier()
            counter = arrived_ptr + seq * NUM_KV_HEADS + kv_head
            before = tl.atomic_add(counter, 1, sem="acq_rel")
            if before == num_parts - 1:
                tl.debug_barrier()
                _join_parts(
                    part_start, out_start, num_parts, GROUP, GROUP_P2, HEAD_DIM, NUM_SPLITS,
                    SPLITS_P2, CHUNK,
                )  # fmt: skip
                tl.store(counter, 0)


def choose_num_splits(num_seqs: int, num_kv_heads: int, max_context: int, device: object) -> int:
    """Parts of a context: about four programs a multiprocessor, no part under 64 tokens."""
    wanted = 4 * num_multiprocessors(torch.device(str(device))) // (num_seqs * num_kv_heads)
    return max(1, min(wanted, -(-max_context // 64), 64))


def decode_attention(
    qkv: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: DecodeWorkspace,
) -> torch.Tensor:
    """See the package's docstring; blocks are token-major and contiguous. Returns `out`."""
    num_seqs = qkv.shape[0]
    block_size, num_kv_heads, head_dim = k_blocks.shape[1:]
    num_heads = out.shape[1] // head_dim
    group = num_heads // num_kv_heads
    tile = min(64, block_size)
    if block_size % tile or tile & (tile - 1) or head_dim & (head_dim - 1):
        raise ValueError(f"blocks of {block_size} tokens and heads of {head_dim} are not supported")
    splits = workspace.num_splits
    pdl = has_dependent_launch(qkv.device)
    group_p2 = triton.next_power_of_2(group)
    _attend[(num_kv_heads, splits, num_seqs)](
        qkv, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, cos, sin,
        block_tables, context_lens, k_blocks, v_blocks, out, workspace.partial, workspace.arrived,
        eps, scale * _LOG2_E, block_tables.stride(0), k_blocks.stride(0), k_blocks.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_P2=group_p2,
        ROWS=max(_MIN_DOT_ROWS, group_p2), HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=tile,
        NUM_SPLITS=splits, SPLITS_P2=triton.next_power_of_2(splits),
        CHUNK=min(16, triton.next_power_of_2(splits)), HAS_NORM=q_norm is not None, PDL=pdl,
        num_warps=4, num_stages=3, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
