"""Fused decode attention in Triton: every program takes an equal share of all contexts' tiles.

The tiles of all sequences stand in one row; program p of a kv head takes the p-th stretch of it, which
may begin and end inside of sequences (stream-K, Osama et al. 2023, over flash-decoding). So programs
end together whatever the lengths are, and their number does not depend on them. A program finds its
stretch itself, from the lengths. It norms and rotates the few queries of each of its sequences
(cheaper than another kernel); the one with a context's end makes and stores the new key and value, and
takes them from its registers. The last program of a (sequence, kv head) to arrive joins the parts.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.decode_attention import (
    SHORT_CONTEXT,
    DecodeWorkspace,
    LaunchShape,
    SharedPrefixes,
)
from finback.kernels.rotary_store_kv.cuda_triton import normed_and_rotated
from finback.kernels.triton_launch import has_dependent_launch, num_multiprocessors

_MIN_DOT_ROWS = 16
_LOG2_E = 1.4426950408889634
_FEW, _MANY = 16, 128
_JOINED = 8
_SHARED_SHAPE = (64, 4, 3)
"""(tokens of a tile, warps, stages) over a shared prefix."""


@triton.jit
def _join_parts(
    partial_ptr, out_ptr, first_program, num_parts, head, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HEAD_DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out [GROUP, HEAD_DIM] from a sequence's parts (accumulator, maximum, sum), CHUNK at a time."""
    width: tl.constexpr = HEAD_DIM + 2
    group = tl.arange(0, GROUP_P2)
    dims = tl.arange(0, HEAD_DIM)
    high = tl.full([GROUP_P2], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_P2], dtype=tl.float32)
    mixed = tl.zeros([GROUP_P2, HEAD_DIM], dtype=tl.float32)
    for start in range(0, num_parts, CHUNK):
        part = start + tl.arange(0, CHUNK)
        # Only the first part begins where its sequence does: it is its program's second one.
        place = 2 * (first_program + part) + (part == 0).to(tl.int32)
        row = place.to(tl.int64)[:, None] * NUM_HEADS + head + group[None, :]
        rows = partial_ptr + row * width
        inside = (part < num_parts)[:, None] & (group < GROUP)[None, :]
        highs = tl.load(rows + HEAD_DIM, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(rows + HEAD_DIM + 1, mask=inside, other=0.0, cache_modifier=".cg")
        new_high = tl.maximum(high, tl.max(highs, axis=0))
        new_high = tl.where(group < GROUP, new_high, 0.0)
        shrink = tl.exp2(high - new_high)
        weight = tl.exp2(highs - new_high[None, :])
        total = total * shrink + tl.sum(sums * weight, axis=0)
        values = tl.load(
            rows[:, :, None] + dims[None, None, :], mask=inside[:, :, None], other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        mixed = mixed * shrink[:, None] + tl.sum(values * weight[:, :, None], axis=0)
        high = new_high
    total = tl.where(group < GROUP, total, 1.0)
    into = out_ptr + group[:, None] * HEAD_DIM + dims[None, :]
    found = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(into, found, mask=(group < GROUP)[:, None])


@triton.jit
def _keys_and_values(
    k_ptr, v_ptr, block, tile, position, stride_block, stride_token,
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
    is_old = first + tokens < position
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
def _shared_state(
    shared_ptr, seq, head, rows, is_row, high, total, mixed, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The softmax's state over a shared prefix, from its SHARED parts."""
    width: tl.constexpr = HEAD_DIM + 2
    dims = tl.arange(0, HEAD_DIM)
    own = shared_ptr + (seq.to(tl.int64) * NUM_HEADS + head + rows) * (SHARED * width)
    for part in range(SHARED):
        at = own + part * width
        part_high = tl.load(at + HEAD_DIM, mask=is_row, other=0.0, cache_modifier=".cg")
        part_total = tl.load(at + HEAD_DIM + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        values = tl.load(
            at[:, None] + dims[None, :], mask=is_row[:, None], other=0.0, cache_modifier=".cg"
        )
        new_high = tl.maximum(high, part_high)
        shrink = tl.exp2(high - new_high)
        weight = tl.exp2(part_high - new_high)
        total = total * shrink + part_total * weight
        mixed = mixed * shrink[:, None] + values * weight[:, None]
        high = new_high
    return high, total, mixed


@triton.jit
def _segment(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, k_ptr, v_ptr, out_ptr,
    partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block, stride_token,
    kv_head, program, seq, context_len, begin, end, start, seq_begin, per_program,
    shared_ptr, SHARED: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr, HAS_NORM: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Tiles [begin, end) of one sequence, for one kv head and its GROUP query heads.

    Tiles before `start` were attended to with others that share them, in SHARED parts.
    """
    half: tl.constexpr = HEAD_DIM // 2
    width: tl.constexpr = HEAD_DIM + 2
    at = tl.arange(0, half)
    dims = tl.arange(0, HEAD_DIM)
    head_at = kv_head * HEAD_DIM
    table = table_ptr + seq.to(tl.int64) * stride_table
    position = context_len - 1
    num_tiles = tl.cdiv(context_len, TILE)
    # Tables and old KV are from earlier steps: fetch while the kernel before ends.
    block = tl.load(table + begin * TILE // BLOCK_SIZE)
    k1, k2, v, is_old = _keys_and_values(
        k_ptr + head_at, v_ptr + head_at, block, begin, position, stride_block, stride_token,
        HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    cos = tl.load(cos_ptr + position * half + at)
    sin = tl.load(sin_ptr + position * half + at)
    if WAIT:
        tl_cuda.gdc_wait()
    rows = tl.arange(0, ROWS)
    is_row = rows < GROUP
    row_start = qkv_ptr + seq.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    q1, q2 = normed_and_rotated(
        row_start + kv_head * (GROUP * HEAD_DIM), q_norm_ptr, cos, sin, eps, is_row, ROWS,
        HEAD_DIM, HAS_NORM,
    )  # fmt: skip
    q1 = q1.to(k_ptr.dtype.element_ty)
    q2 = q2.to(k_ptr.dtype.element_ty)
    high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    if SHARED > 0:  # noqa: SIM102 - known when compiled; the next is known when run
        if (begin == start) & (start > 0):
            high, total, mixed = _shared_state(
                shared_ptr, seq, kv_head * GROUP, rows, is_row, high, total, mixed, NUM_HEADS,
                HEAD_DIM, SHARED,
            )  # fmt: skip
    if end == num_tiles:
        k_start = row_start + NUM_HEADS * HEAD_DIM + head_at
        one = tl.arange(0, 1)
        new_k1, new_k2 = normed_and_rotated(
            k_start, k_norm_ptr, cos, sin, eps, one < 1, 1, HEAD_DIM, HAS_NORM
        )
        new_k1 = new_k1.to(k_ptr.dtype.element_ty)
        new_k2 = new_k2.to(k_ptr.dtype.element_ty)
        new_v = tl.load(k_start + NUM_KV_HEADS * HEAD_DIM + dims).to(v_ptr.dtype.element_ty)
        place = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
        into = place * stride_block + (position % BLOCK_SIZE) * stride_token + head_at
        tl.store(k_ptr + into + at[None, :], new_k1)
        tl.store(k_ptr + into + half + at[None, :], new_k2)
        tl.store(v_ptr + into + dims, new_v)
        score = tl.sum(q1.to(tl.float32) * new_k1.to(tl.float32), axis=1)
        score += tl.sum(q2.to(tl.float32) * new_k2.to(tl.float32), axis=1)
        score = score * scale
        new_high = tl.maximum(high, score)
        shrink = tl.exp2(high - new_high)
        weight = tl.exp2(score - new_high)
        total = total * shrink + weight
        mixed = mixed * shrink[:, None] + weight[:, None] * new_v.to(tl.float32)[None, :]
        high = new_high
    high, total, mixed = _absorb(q1, q2, k1, k2, v, is_old, high, total, mixed, scale)
    block = tl.load(table + (begin + 1) * TILE // BLOCK_SIZE, mask=begin + 1 < end, other=0)
    for tile in range(begin + 1, end):
        # Looked up a tile ahead, so that the fetches of keys and values can run ahead too.
        ahead = (tile + 1) * TILE // BLOCK_SIZE
        next_block = tl.load(table + ahead, mask=tile + 1 < end, other=0)
        k1, k2, v, is_old = _keys_and_values(
            k_ptr + head_at, v_ptr + head_at, block, tile, position, stride_block, stride_token,
            HEAD_DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
        high, total, mixed = _absorb(q1, q2, k1, k2, v, is_old, high, total, mixed, scale)
        block = next_block
    head = kv_head * GROUP
    out_start = out_ptr + (seq.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    first_program = seq_begin // per_program
    num_parts = (seq_begin + num_tiles - start - 1) // per_program - first_program + 1
    if WHOLE or num_parts == 1:
        found = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_start + rows[:, None] * HEAD_DIM + dims[None, :], found, mask=is_row[:, None])
    else:
        row = (2 * program + (begin == start).to(tl.int32)).to(tl.int64) * NUM_HEADS + head
        mine = partial_ptr + (row + rows) * width
        tl.store(mine[:, None] + dims[None, :], mixed, mask=is_row[:, None])
        tl.store(mine + HEAD_DIM, high, mask=is_row)
        tl.store(mine + HEAD_DIM + 1, total, mask=is_row)
        tl.debug_barrier()
        counter = arrived_ptr + seq * NUM_KV_HEADS + kv_head
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        if before == num_parts - 1:
            tl.debug_barrier()
            _join_parts(
                partial_ptr, out_start, first_program, num_parts, head, NUM_HEADS, GROUP,
                GROUP_P2, HEAD_DIM, CHUNK,
            )  # fmt: skip
            tl.store(counter, 0)


@triton.jit
def _attend_whole(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, context_ptr, k_ptr, v_ptr,
    out_ptr, partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block, stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence, for one kv head."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    context_len = tl.load(context_ptr + seq)
    if context_len > 0:
        num_tiles = tl.cdiv(context_len, TILE)
        begin = seq * 0
        _segment(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, k_ptr, v_ptr, out_ptr,
            partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block, stride_token,
            kv_head, seq, seq, context_len, begin, num_tiles, begin, begin, num_tiles,
            partial_ptr, 0, NUM_HEADS, NUM_KV_HEADS, GROUP, GROUP_P2, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, CHUNK,
            True, HAS_NORM, PDL,
        )  # fmt: skip
    elif PDL:
        tl_cuda.gdc_wait()


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, context_ptr, k_ptr, v_ptr,
    out_ptr, partial_ptr, arrived_ptr, num_seqs, eps, scale, stride_table, stride_block,
    stride_token, start_ptr, shared_ptr, SHARED: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_P2: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MIN_TILES: tl.constexpr, SEQS_P2: tl.constexpr, CHUNK: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program's share of all tiles, for one kv head."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    seqs = tl.arange(0, SEQS_P2)
    lens = tl.load(context_ptr + seqs, mask=seqs < num_seqs, other=0)
    tiles = (lens + (TILE - 1)) // TILE
    if SHARED > 0:
        starts = tl.load(start_ptr + seqs, mask=seqs < num_seqs, other=0)
        tiles -= starts * (BLOCK_SIZE // TILE)
    ends = tl.cumsum(tiles, axis=0)
    num_all = tl.sum(tiles, axis=0)
    per_program = tl.maximum(tl.cdiv(num_all, tl.num_programs(1)), MIN_TILES)
    cursor = program * per_program
    stop = tl.minimum(cursor + per_program, num_all)
    is_before = ends <= cursor
    seq = tl.sum(is_before.to(tl.int32), axis=0)
    seq_begin = tl.max(tl.where(is_before, ends, 0), axis=0)
    if cursor < stop:
        context_len = tl.load(context_ptr + seq)
        start = seq * 0
        if SHARED > 0:
            start = tl.load(start_ptr + seq) * (BLOCK_SIZE // TILE)
        num_tiles = tl.cdiv(context_len, TILE)
        begin = start + cursor - seq_begin
        end = tl.minimum(num_tiles, start + stop - seq_begin)
        _segment(
            qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, k_ptr, v_ptr, out_ptr,
            partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block, stride_token,
            kv_head, program, seq, context_len, begin, end, start, seq_begin, per_program,
            shared_ptr, SHARED, NUM_HEADS, NUM_KV_HEADS, GROUP, GROUP_P2, ROWS, HEAD_DIM,
            BLOCK_SIZE, TILE, CHUNK, False, HAS_NORM, PDL,
        )  # fmt: skip
        seq_begin += num_tiles - start
        seq += 1
        while seq_begin < stop:
            context_len = tl.load(context_ptr + seq)
            if SHARED > 0:
                start = tl.load(start_ptr + seq) * (BLOCK_SIZE // TILE)
            num_tiles = tl.cdiv(context_len, TILE)
            end = tl.minimum(num_tiles, start + stop - seq_begin)
            if num_tiles > start:
                _segment(
                    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, table_ptr, k_ptr, v_ptr,
                    out_ptr, partial_ptr, arrived_ptr, eps, scale, stride_table, stride_block,
                    stride_token, kv_head, program, seq, context_len, start, end, start,
                    seq_begin, per_program, shared_ptr, SHARED, NUM_HEADS, NUM_KV_HEADS, GROUP,
                    GROUP_P2, ROWS, HEAD_DIM, BLOCK_SIZE, TILE, CHUNK, False, HAS_NORM, False,
                )  # fmt: skip
            seq_begin += num_tiles - start
            seq += 1
    elif PDL:
        tl_cuda.gdc_wait()


@triton.jit
def _attend_shared(
    qkv_ptr, q_norm_ptr, cos_ptr, sin_ptr, table_ptr, context_ptr, k_ptr, v_ptr, chunk_ptr,
    shared_ptr, eps, scale, stride_table, stride_block, stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    MEMBERS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SHARED: tl.constexpr, HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a shared prefix, for one kv head and the query heads of all that share it."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    chunk = chunk_ptr + tl.program_id(2) * (MEMBERS + 1)
    half: tl.constexpr = HEAD_DIM // 2
    width: tl.constexpr = HEAD_DIM + 2
    at = tl.arange(0, half)
    dims = tl.arange(0, HEAD_DIM)
    num_tiles = tl.load(chunk) * (BLOCK_SIZE // TILE)
    if num_tiles > 0:
        per_part = tl.cdiv(num_tiles, SHARED)
        begin = part * per_part
        end = tl.minimum(begin + per_part, num_tiles)
        rows = tl.arange(0, ROWS)
        member = rows // GROUP
        seq = tl.load(chunk + 1 + member, mask=member < MEMBERS, other=-1)
        is_row = seq >= 0
        seq = tl.where(is_row, seq, 0)
        position = tl.load(context_ptr + seq, mask=is_row, other=1) - 1
        head = kv_head * GROUP + rows % GROUP
        q_row = seq.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head * HEAD_DIM
        where = qkv_ptr + q_row[:, None] + at[None, :]
        first = tl.load(where, mask=is_row[:, None], other=0.0).to(tl.float32)
        second = tl.load(where + half, mask=is_row[:, None], other=0.0).to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            inverse = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
            first *= inverse * tl.load(q_norm_ptr + at).to(tl.float32)[None, :]
            second *= inverse * tl.load(q_norm_ptr + half + at).to(tl.float32)[None, :]
        angle = position[:, None] * half + at[None, :]
        cos = tl.load(cos_ptr + angle, mask=is_row[:, None], other=0.0)
        sin = tl.load(sin_ptr + angle, mask=is_row[:, None], other=0.0)
        q1 = (first * cos - second * sin).to(k_ptr.dtype.element_ty)
        q2 = (second * cos + first * sin).to(k_ptr.dtype.element_ty)
        high = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        mixed = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
        # All members have these blocks: the first one's table will do.
        table = table_ptr + tl.load(chunk + 1).to(tl.int64) * stride_table
        head_at = kv_head * HEAD_DIM
        block = tl.load(table + begin * TILE // BLOCK_SIZE, mask=begin < end, other=0)
        for tile in range(begin, end):
            ahead = (tile + 1) * TILE // BLOCK_SIZE
            next_block = tl.load(table + ahead, mask=tile + 1 < end, other=0)
            k1, k2, v, is_old = _keys_and_values(
                k_ptr + head_at, v_ptr + head_at, block, tile, 1 << 30, stride_block,
                stride_token, HEAD_DIM, BLOCK_SIZE, TILE,
            )  # fmt: skip
            high, total, mixed = _absorb(q1, q2, k1, k2, v, is_old, high, total, mixed, scale)
            block = next_block
        own = shared_ptr + ((seq.to(tl.int64) * NUM_HEADS + head) * SHARED + part) * width
        tl.store(own[:, None] + dims[None, :], mixed, mask=is_row[:, None])
        tl.store(own + HEAD_DIM, high, mask=is_row)
        tl.store(own + HEAD_DIM + 1, total, mask=is_row)


def launch_shape(
    num_seqs: int, max_context: int, num_kv_heads: int, device: str | torch.device
) -> LaunchShape:
    """Programs a kv head and the shape of one, as measured on an H200.

    Many short contexts: a program each, since going from one to the next takes longer than they do.
    """
    if num_seqs >= _MANY and max_context <= SHORT_CONTEXT:
        return LaunchShape(num_programs=num_seqs, tile=16, num_warps=1, num_stages=2, is_whole=True)
    shapes = ((2, (4, 64, 4, 1)), (_FEW, (2, 64, 4, 3)), (1 << 30, (8, 16, 1, 2)))
    resident, tile, warps, stages = next(shape for most, shape in shapes if num_seqs < most)
    programs = max(1, num_multiprocessors(torch.device(device)) * resident // num_kv_heads)
    return LaunchShape(num_programs=programs, tile=tile, num_warps=warps, num_stages=stages)


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
    shared: SharedPrefixes | None = None,
) -> torch.Tensor:
    """See the package's docstring; blocks are token-major and contiguous. Returns `out`."""
    num_seqs = qkv.shape[0]
    block_size, num_kv_heads, head_dim = k_blocks.shape[1:]
    num_heads = out.shape[1] // head_dim
    group = num_heads // num_kv_heads
    shape = workspace.shape
    tile = min(shape.tile, block_size)
    if shape.is_whole and shared is not None:
        raise ValueError("whole sequences share no prefix")
    if shape.is_whole and shape.num_programs != num_seqs:
        raise ValueError(f"{shape.num_programs} programs for {num_seqs} whole sequences")
    if block_size % tile or tile & (tile - 1) or head_dim & (head_dim - 1):
        raise ValueError(f"blocks of {block_size} tokens and heads of {head_dim} are not supported")
    pdl = has_dependent_launch(qkv.device)
    group_p2 = triton.next_power_of_2(group)
    inputs = (
        qkv, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, cos, sin,
        block_tables, context_lens, k_blocks, v_blocks, out, workspace.partial, workspace.arrived,
    )  # fmt: skip
    numbers = (
        eps, scale * _LOG2_E, block_tables.stride(0), k_blocks.stride(0), k_blocks.stride(1),
    )  # fmt: skip
    shapes = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "GROUP_P2": group_p2,
        "ROWS": max(_MIN_DOT_ROWS, group_p2),
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE": tile,
        "CHUNK": _JOINED,
        "HAS_NORM": q_norm is not None,
        "PDL": pdl,
        "num_warps": shape.num_warps,
        "num_stages": shape.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    }
    grid = (num_kv_heads, shape.num_programs)
    if shared is not None:
        _launch_shared(inputs, numbers, shapes, shared)
    if shape.is_whole:
        _attend_whole[grid](*inputs, *numbers, **shapes)
    else:
        _attend[grid](
            *inputs, num_seqs, *numbers,
            context_lens if shared is None else shared.start_blocks,
            workspace.partial if shared is None else shared.parts,
            SHARED=0 if shared is None else shared.parts.shape[2], **shapes,
            MIN_TILES=max(1, shape.min_tokens // tile),
            SEQS_P2=max(16, triton.next_power_of_2(num_seqs)),
        )  # fmt: skip
    return out


def _launch_shared(
    inputs: tuple[torch.Tensor, ...],
    numbers: tuple[float, ...],
    shapes: dict[str, int],
    shared: SharedPrefixes,
) -> None:
    """Attend to the shared prefixes, before each sequence goes on by itself."""
    qkv, q_norm, _, cos, sin, tables, context_lens, k_blocks, v_blocks = inputs[:9]
    num_chunks, width = shared.chunks.shape
    grid = (shapes["NUM_KV_HEADS"], shared.parts.shape[2], num_chunks)
    kept = {
        name: value
        for name, value in shapes.items()
        if name not in ("GROUP_P2", "CHUNK", "TILE", "num_warps", "num_stages")
    }
    _attend_shared[grid](
        qkv, q_norm, cos, sin, tables, context_lens, k_blocks, v_blocks, shared.chunks,
        shared.parts, *numbers, MEMBERS=width - 1, SHARED=shared.parts.shape[2],
        TILE=min(_SHARED_SHAPE[0], shapes["BLOCK_SIZE"]), num_warps=_SHARED_SHAPE[1],
        num_stages=_SHARED_SHAPE[2], **kept,
    )  # fmt: skip
