"""The phases of a layer. Each is run by all threads, which claim pieces of it."""

from finback.kernels.compiled import device_function, inlined
from finback.kernels.decoder_stack.layout import (
    CACHED_K,
    ROW_BLOCK,
    SCRATCH_FIXED_BYTES,
    SYNC_CLAIMS,
    SYNC_LINE,
    Job,
    Layer,
)
from finback.kernels.embedding.cpu_rows import embed_row
from finback.kernels.linear.cpu_multiply import (
    PANEL_BYTES,
    multiply_pair,
    multiply_tile,
)
from finback.kernels.linear.cpu_packing import BF16, F16, Q8
from finback.kernels.linear.cpu_tiles import TILE_COLUMNS
from finback.kernels.native import atomic_add, cycles, peek_i32, peek_i64, poke_i64, wait_for
from finback.kernels.paged_attention.cpu_rows import (
    divided_copy,
    mix_over_blocks,
    scaled_copy,
    scores_over_blocks,
    softmax_row,
)
from finback.kernels.rms_norm.cpu_rows import add_norm
from finback.kernels.rotary.cpu_rows import rotary
from finback.kernels.silu_mul.cpu_rows import silu_mul
from finback.kernels.simd import LANES, MAX_TILE_ROWS
from finback.kernels.store_kv.cpu_rows import (
    store_key_bf16,
    store_key_f16,
    store_key_f32,
    store_value_bf16,
    store_value_f16,
    store_value_f32,
)

# mypy: disable-error-code="no-untyped-def"
# Everything here is typed by numba, from the int64 job array on.

_J_ROWS = int(Job.NUM_ROWS)


@device_function
def claim(job, phase, chunk):
    """The next piece of a phase: its first unit."""
    return atomic_add(job[Job.SYNC] + SYNC_CLAIMS + phase * SYNC_LINE, chunk)


@device_function
def complete(job, phase, count):
    """Tell that `count` units of a phase are done."""
    atomic_add(job[Job.SYNC] + SYNC_CLAIMS + phase * SYNC_LINE + 8, count)


@device_function
def wait_until_complete(job, phase, total):
    """The end of a phase: all units done, by whichever threads are awake."""
    wait_for(job[Job.SYNC] + SYNC_CLAIMS + phase * SYNC_LINE + 8, total)


@inlined
def mark(thread, job, phase):
    """Write down when a phase ended, if that is asked for."""
    if thread == 0 and job[Job.CLOCK] != 0:
        poke_i64(job[Job.CLOCK] + phase * 8, cycles())


@device_function
def chunk_of(total, num_threads):
    """Units to claim at once: a few claims a thread, so that a late thread holds little."""
    return max(1, total // (num_threads * 6))


@device_function
def embed_rows(job, phase, num_threads):
    """X = rows of the embedding table."""
    total = job[_J_ROWS]
    chunk = chunk_of(total, num_threads)
    hidden = job[Job.HIDDEN]
    start = claim(job, phase, chunk)
    while start < total:
        for row in range(start, min(start + chunk, total)):
            token = peek_i32(job[Job.TOKEN_IDS] + row * 4)
            embed_row(job[Job.EMBEDDING], token, hidden, job[Job.X] + row * hidden * 4)
        complete(job, phase, min(chunk, total - start))
        start = claim(job, phase, chunk)
    wait_until_complete(job, phase, total)


@device_function
def norm_rows(job, phase, num_threads, weight, has_delta):
    """X += DELTA; NORMED = norm(X)."""
    total = job[_J_ROWS]
    chunk = chunk_of(total, num_threads)
    hidden = job[Job.HIDDEN]
    start = claim(job, phase, chunk)
    while start < total:
        for row in range(start, min(start + chunk, total)):
            at = row * hidden * 4
            delta = job[Job.DELTA] + at if has_delta else 0
            add_norm((job[Job.X] + at, delta, weight, job[Job.NORMED] + at, hidden, job[Job.EPS]))
        complete(job, phase, min(chunk, total - start))
        start = claim(job, phase, chunk)
    wait_until_complete(job, phase, total)


@device_function
def norm_out_rows(job, phase, num_threads, has_delta):
    """OUT = norm(X + DELTA) of the rows that leave."""
    total = job[Job.NUM_OUT]
    hidden = job[Job.HIDDEN]
    index = claim(job, phase, 1)
    while index < total:
        row = peek_i64(job[Job.OUT_ROWS] + index * 8)
        at = row * hidden * 4
        delta = job[Job.DELTA] + at if has_delta else 0
        out = job[Job.OUT] + index * hidden * 4
        # Two outputs may name one row: X is not changed here.
        scaled_copy((job[Job.X] + at, out, hidden, _ONE_BITS))
        add_norm((out, delta, job[Job.FINAL_NORM], out, hidden, job[Job.EPS]))
        complete(job, phase, 1)
        index = claim(job, phase, 1)
    wait_until_complete(job, phase, total)


_ONE_BITS = 0x3F800000


@device_function
def multiply(job, phase, num_threads, tiles, num_tiles, num_rows, x, num_k, out, out_step, panel):
    """out[rows, columns] = x @ tiles; threads claim tiles, row block by row block."""
    pairs = (num_tiles + 1) // 2
    row_block = min(
        ROW_BLOCK, max(MAX_TILE_ROWS, CACHED_K // num_k // MAX_TILE_ROWS * MAX_TILE_ROWS)
    )
    blocks = (num_rows + row_block - 1) // row_block
    total = pairs * blocks
    chunk = chunk_of(pairs, num_threads)
    start = claim(job, phase, chunk)
    while start < total:
        for unit in range(start, min(start + chunk, total)):
            first = unit // pairs * row_block
            tile = unit % pairs * 2
            rows = min(row_block, num_rows - first)
            multiply_two(
                tiles,
                tile,
                num_tiles,
                rows,
                x + first * num_k * 4,
                num_k,
                out + first * out_step + tile * TILE_COLUMNS * 4,
                out_step,
                panel,
            )
        complete(job, phase, min(chunk, total - start))
        start = claim(job, phase, chunk)
    wait_until_complete(job, phase, total)


@device_function
def multiply_two(tiles, tile, num_tiles, rows, x, num_k, out, out_step, panel):
    """Tiles `tile` and the one after it, if there is one, for all rows."""
    w, kind = peek_i64(tiles + tile * 16), peek_i64(tiles + tile * 16 + 8)
    if tile + 1 == num_tiles:
        multiply_tile(kind, w, rows, x, num_k * 4, num_k, out, out_step, panel)
        return
    w2, kind2 = peek_i64(tiles + tile * 16 + 16), peek_i64(tiles + tile * 16 + 24)
    if rows == 1 and kind >= Q8 and kind == kind2:
        multiply_pair(kind, w, w2 - w, x, num_k, out)
    else:
        multiply_tile(kind, w, rows, x, num_k * 4, num_k, out, out_step, panel)
        multiply_tile(kind2, w2, rows, x, num_k * 4, num_k, out + TILE_COLUMNS * 4, out_step, panel)


@device_function
def gate_up(job, phase, num_threads, tiles, num_rows, panel, buffer):
    """ACTIVATED = silu(gate) * up. A tile holds LANES gates and their ups; `buffer`: two tiles."""
    inner, hidden = job[Job.INNER], job[Job.HIDDEN]
    num_tiles = inner // LANES
    pairs = (num_tiles + 1) // 2
    blocks = (num_rows + ROW_BLOCK - 1) // ROW_BLOCK
    total = pairs * blocks
    chunk = chunk_of(pairs, num_threads)
    buffer_step = 2 * TILE_COLUMNS * 4
    start = claim(job, phase, chunk)
    while start < total:
        for unit in range(start, min(start + chunk, total)):
            first = unit // pairs * ROW_BLOCK
            tile = unit % pairs * 2
            rows = min(ROW_BLOCK, num_rows - first)
            x = job[Job.NORMED] + first * hidden * 4
            multiply_two(tiles, tile, num_tiles, rows, x, hidden, buffer, buffer_step, panel)
            for row in range(rows):
                for part in range(min(2, num_tiles - tile)):
                    gate = buffer + row * buffer_step + part * TILE_COLUMNS * 4
                    out = job[Job.ACTIVATED] + ((first + row) * inner + (tile + part) * LANES) * 4
                    silu_mul((gate, gate + LANES * 4, out, LANES))
        complete(job, phase, min(chunk, total - start))
        start = claim(job, phase, chunk)
    wait_until_complete(job, phase, total)


@device_function
def rotate_and_store(job, phase, num_threads, layer, q_norm, k_norm):
    """Norm (Qwen3) and rotate queries and keys in QKV; write keys and values to their blocks."""
    total = job[_J_ROWS]
    chunk = chunk_of(total, num_threads)
    start = claim(job, phase, chunk)
    while start < total:
        for row in range(start, min(start + chunk, total)):
            _rotate_row(job, row, q_norm, k_norm)
            _store_row(job, row, layer)
        complete(job, phase, min(chunk, total - start))
        start = claim(job, phase, chunk)
    wait_until_complete(job, phase, total)


@inlined
def _rotate_row(job, row, q_norm, k_norm):
    heads, kv_heads, dim = job[Job.NUM_HEADS], job[Job.NUM_KV_HEADS], job[Job.HEAD_DIM]
    qkv = job[Job.QKV] + row * (heads + 2 * kv_heads) * dim * 4
    angle = peek_i32(job[Job.POSITIONS] + row * 4) * dim * 2
    cos, sin = job[Job.COS] + angle, job[Job.SIN] + angle
    for head in range(heads + kv_heads):
        at = qkv + head * dim * 4
        weight = q_norm if head < heads else k_norm
        if weight != 0:
            add_norm((at, 0, weight, at, dim, job[Job.EPS]))
        rotary((at, cos, sin, dim // 2))


@inlined
def _store_row(job, row, layer):
    heads, kv_heads, dim = job[Job.NUM_HEADS], job[Job.NUM_KV_HEADS], job[Job.HEAD_DIM]
    size, item, kind = job[Job.BLOCK_SIZE], job[Job.KV_ITEM_BYTES], job[Job.KV_KIND]
    keys = job[Job.QKV] + (row * (heads + 2 * kv_heads) + heads) * dim * 4
    slot = peek_i32(job[Job.SLOTS] + row * 4)
    block, offset = slot // size, slot % size
    place = layer * job[Job.KV_LAYER_STEP] + block * job[Job.KV_BLOCK_BYTES]
    for head in range(kv_heads):
        source = keys + head * dim * 4
        value = source + kv_heads * dim * 4
        head_at = place + head * dim * size * item
        key_at = job[Job.KEYS] + head_at + offset * item
        value_at = job[Job.VALUES] + head_at + offset * dim * item
        if kind == F16:
            store_key_f16((source, key_at, dim, size * 2))
            store_value_f16((value, value_at, dim))
        elif kind == BF16:
            store_key_bf16((source, key_at, dim, size * 2))
            store_value_bf16((value, value_at, dim))
        else:
            store_key_f32((source, key_at, dim, size * 4))
            store_value_f32((value, value_at, dim))


@device_function
def rows_of_tile(job):
    """Query rows that share a tile: all heads of a group of each."""
    return max(1, MAX_TILE_ROWS // (job[Job.NUM_HEADS] // job[Job.NUM_KV_HEADS]))


@device_function
def attend(job, phase, num_threads, layer, num_units, scratch):
    """MIXED = attention of all rows; a unit is a few rows of a sequence and one key/value head."""
    kv_heads = job[Job.NUM_KV_HEADS]
    total = num_units * kv_heads
    chunk = chunk_of(total, num_threads)
    start = claim(job, phase, chunk)
    while start < total:
        for index in range(start, min(start + chunk, total)):
            unit = job[Job.UNITS] + index // kv_heads * 24
            _attend_unit(
                job,
                layer,
                peek_i64(unit),
                peek_i64(unit + 8),
                peek_i64(unit + 16),
                index % kv_heads,
                scratch,
            )
        complete(job, phase, min(chunk, total - start))
        start = claim(job, phase, chunk)
    wait_until_complete(job, phase, total)


@inlined
def _attend_unit(job, layer, seq, first_row, num_rows, kv_head, scratch):
    """Rows [first_row, first_row + num_rows) of a sequence, all query heads of one group."""
    group = job[Job.NUM_HEADS] // job[Job.NUM_KV_HEADS]
    dim, scores_step = job[Job.HEAD_DIM], job[Job.SCORES_STEP]
    last = peek_i32(job[Job.CU_SEQLENS] + seq * 4 + 4) - 1
    context_len = peek_i32(job[Job.CONTEXT_LENS] + seq * 4)
    # Row r sees context_len - (last - r) tokens.
    seen_first = context_len - (last - first_row)
    length = seen_first + num_rows - 1
    padded = (length + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    table = job[Job.TABLES] + seq * job[Job.TABLE_STEP]
    step = dim * 4
    q = scratch + SCRATCH_FIXED_BYTES
    out = q + MAX_TILE_ROWS * step
    scores = out + MAX_TILE_ROWS * step
    row_bytes = (job[Job.NUM_HEADS] + 2 * job[Job.NUM_KV_HEADS]) * step
    layer_at = layer * job[Job.KV_LAYER_STEP]
    head_offset = layer_at + kv_head * dim * job[Job.BLOCK_SIZE] * job[Job.KV_ITEM_BYTES]
    # Groups wider than a tile (8 heads on a key/value head) are taken in parts.
    part = min(group, MAX_TILE_ROWS)
    for head0 in range(0, group, part):
        heads = min(part, group - head0)
        count = num_rows * heads
        for i in range(count):
            head = kv_head * group + head0 + i % heads
            source = job[Job.QKV] + (first_row + i // heads) * row_bytes + head * step
            scaled_copy((source, q + i * step, dim, job[Job.SCALE]))
        scores_over_blocks(
            job[Job.KV_KIND],
            job[Job.KV_ITEM_BYTES],
            count,
            q,
            step,
            job[Job.KEYS],
            job[Job.KV_BLOCK_BYTES],
            head_offset,
            table,
            job[Job.BLOCK_SIZE],
            dim,
            length,
            scores,
            scores_step,
        )
        for i in range(count):
            softmax_row(
                (scores + i * scores_step, seen_first + i // heads, padded, scratch + i * 4)
            )
        mix_over_blocks(
            job[Job.KV_KIND],
            job[Job.KV_ITEM_BYTES],
            count,
            scores,
            scores_step,
            job[Job.VALUES],
            job[Job.KV_BLOCK_BYTES],
            head_offset,
            table,
            job[Job.BLOCK_SIZE],
            dim,
            length,
            out,
            step,
        )
        for i in range(count):
            head = kv_head * group + head0 + i % heads
            target = job[Job.MIXED] + ((first_row + i // heads) * job[Job.NUM_HEADS] + head) * step
            divided_copy((out + i * step, target, dim, scratch + i * 4))


PANEL_AT = 0
"""Thread scratch of the matrix phases: the panel, then the buffer of gate and up."""

BUFFER_AT = PANEL_BYTES
_ = Layer  # columns are used by the driver
