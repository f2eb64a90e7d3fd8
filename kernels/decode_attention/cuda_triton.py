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
def _keys_and_values(
    k_ptr, v_ptr, block, tile, position, is_live, stride_block, stride_token,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Both halves of a tile's keys, its values, and which of its tokens lie before the new one."""
    half: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, half)
    tokens = tl.arange(0, TILE)
    first = tile * TILE
    where = (
        block.to(tl.int64) * stride_block + (first % BLOCK_SIZE + tokens)[:, None] * stride_token
    )
    # The last position is the new token's: it comes from registers.
    is_old = (first + tokens < position) & is_live
    mask = is_old[:, None]
    k1 = tl.load(k_ptr + where + at[None, :], mask=mask, other=0.0)
    k2 = tl.load(k_ptr + where + half + at[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + where + tl.arange(0, HEAD_DIM)[None, :], mask=mask, other=0.0)
    return k1, k2, v, is_old


@triton.jit
def _absorb(q1, q2, k1, k2, v, is_old, high, total, mixed, scale):
    """The online softmax's step over a tile."""
    score = tl.dot(q1, tl.trans(k1))
    score = tl.dot(q2, tl.trans(k2), score)
    score = tl.where(is_old[None, :], score * scale, float("-inf"))
    new_high = tl.maximum(high, tl.max(score, axis=1))
    shrink = tl.exp2(high - new_high)
    weight = tl.exp2(score - new_high[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None])
    return new_high, total, mixed


@triton.jit
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, context_ptr, k_ptr, v_ptr,
    out_ptr, partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block, stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, NUM_SPLITS: tl.constexpr, MIN_TILES: tl.constexpr,
    SPLITS_P2: tl.constexpr, CHUNK: tl.constexpr, HAS_NORM: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one context for one kv head and its GROUP query heads."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, half)
    dims = tl.arange(0, HEAD_DIM)
    head_at = kv_head * HEAD_DIM
    table = table_ptr + seq * stride_table
    context_len = tl.load(context_ptr + seq)
    position = context_len - 1
    num_tiles = tl.cdiv(context_len, TILE)
    num_parts = tl.minimum(tl.cdiv(num_tiles, MIN_TILES), NUM_SPLITS)
    per_split = tl.cdiv(num_tiles, tl.maximum(num_parts, 1))
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_tiles)
    is_live = begin < num_tiles
    # Lengths, tables and old KV are from earlier steps: fetch while the kernel before ends.
    block = tl.load(table + begin * TILE // BLOCK_SIZE, mask=is_live, other=0)
    if PREFETCH:
        k1_first, k2_first, v_first, is_old_first = _keys_and_values(
            k_ptr + head_at, v_ptr + head_at, block, begin, position, is_live, stride_block,
            stride_token, HEAD_DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
    cos = tl.load(cos_ptr + position * half + at, mask=(at >= 0) & is_live, other=0.0)
    sin = tl.load(sin_ptr + position * half + at, mask=(at >= 0) & is_live, other=0.0)
    if PDL:
        tl_cuda.gdc_wait()
    if is_live:
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
        if end == num_tiles:
            k_start = row_start + NUM_HEADS * HEAD_DIM + head_at
            one = tl.arange(0, 1)
            k1, k2 = normed_and_rotated(
                k_start, k_norm_ptr, cos, sin, eps, one < 1, 1, HEAD_DIM, HAS_NORM
            )
            k1 = k1.to(k_ptr.dtype.element_ty)
            k2 = k2.to(k_ptr.dtype.element_ty)
            v = tl.load(k_start + NUM_KV_HEADS * HEAD_DIM + dims).to(v_ptr.dtype.element_ty)
            place = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            into = place * stride_block + (position % BLOCK_SIZE) * stride_token + head_at
            tl.store(k_ptr + into + at[None, :], k1)
            tl.store(k_ptr + into + half + at[None, :], k2)
            tl.store(v_ptr + into + dims, v)
            score = tl.sum(q1.to(tl.float32) * k1.to(tl.float32), axis=1)
            score += tl.sum(q2.to(tl.float32) * k2.to(tl.float32), axis=1)
            high = score * scale
            total = tl.full([ROWS], 1.0, dtype=tl.float32)
            mixed = mixed + v.to(tl.float32)[None, :]
        if PREFETCH:
            high, total, mixed = _absorb(
                q1, q2, k1_first, k2_first, v_first, is_old_first, high, total, mixed, scale
            )
            block = tl.load(table + (begin + 1) * TILE // BLOCK_SIZE, mask=begin + 1 < end, other=0)
        for tile in range(begin + 1 if PREFETCH else begin, end):
            # Looked up a tile ahead, so that the fetches of keys and values can run ahead too.
            ahead = (tile + 1) * TILE // BLOCK_SIZE
            next_block = tl.load(table + ahead, mask=tile + 1 < end, other=0)
            k1, k2, v, is_old = _keys_and_values(
                k_ptr + head_at, v_ptr + head_at, block, tile, position, is_live, stride_block,
                stride_token, HEAD_DIM, BLOCK_SIZE, TILE,
            )  # fmt: skip
            high, total, mixed = _absorb(q1, q2, k1, k2, v, is_old, high, total, mixed, scale)
            block = next_block
        head = kv_head * GROUP
        out_start = out_ptr + (seq * NUM_HEADS + head) * HEAD_DIM
        num_parts = tl.cdiv(num_tiles, per_split)  # rounding may leave the last parts empty
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


_FEW, _SHORT, _LONG = 64, 512, 1024


def choose_splits(
    num_seqs: int, num_kv_heads: int, max_context: int, device: str
) -> tuple[int, int]:
    """(num_splits, min_tokens) of a workspace.

    Few sequences: about four programs a multiprocessor, of 64 tokens or more. Many: short contexts
    whole; long ones in parts of 1024 tokens, so that the longest do not outlast the others, as far as
    a grid of 16384 programs goes (programs without a part cost something too).
    """
    pairs = num_seqs * num_kv_heads
    wanted = 4 * num_multiprocessors(torch.device(device)) // pairs
    if wanted > 1:
        return max(1, min(wanted, -(-max_context // _FEW), 64)), _FEW
    if max_context <= _SHORT:
        return 1, _SHORT
    return max(1, min(16_384 // pairs, -(-max_context // _LONG), 64)), _LONG


def launch_shape(min_tokens: int) -> tuple[int, int, int]:
    """(tokens of a tile, warps, stages) for what `choose_splits` chose, as measured on an H200.

    One small warp a program wins while contexts are short and alike; with long ones among them its
    programs outlast the others.
    """
    if min_tokens == _SHORT:
        return 16, 1, 2
    return (64, 4, 3) if min_tokens == _LONG else (64, 4, 1)


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
    tile, warps, stages = launch_shape(workspace.min_tokens)
    tile = min(tile, block_size)
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
        NUM_SPLITS=splits, MIN_TILES=max(1, workspace.min_tokens // tile), SPLITS_P2=triton.next_power_of_2(splits),
        CHUNK=min(16, triton.next_power_of_2(splits)), HAS_NORM=q_norm is not None,
        PREFETCH=pdl, PDL=pdl, num_warps=warps, num_stages=stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
