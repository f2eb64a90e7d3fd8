"""Layers over prompt chunks in fast mode: products and attention in bfloat16 on AMX tiles.

X, norms' sums, softmax and all sums of products are float32; what enters a product is bfloat16, ties
rounded away from zero. Keys and values come from the pool, so that they are those that later steps
read. Rows lie in blocks of 32 (see `linear.cpu_amx`); the last block may be partly empty.
"""

from finback.kernels.compiled import device_function, inlined
from finback.kernels.decoder_stack.cpu_phases import (
    claim,
    complete,
    embed_rows,
    mark,
    norm_out_rows,
    rotate_and_store,
    wait_until_complete,
)
from finback.kernels.decoder_stack.layout import SCRATCH_FIXED_BYTES, Job, Layer
from finback.kernels.linear.cpu_amx import (
    BLOCK_ROWS,
    STEP_BYTES,
    STEP_K,
    amx_product,
    amx_start,
    amx_stop,
    bf16_panel_bf16,
    f16_panel_bf16,
    f32_panel_bf16,
    q4_panel_bf16,
    q8_panel_bf16,
)
from finback.kernels.linear.cpu_amx_rows import (
    divided_bf16,
    norm_bf16,
    scaled_bf16,
    silu_mul_bf16,
    softmax_bf16,
)
from finback.kernels.linear.cpu_packing import BF16, F16, F32, Q4, Q8
from finback.kernels.linear.cpu_tiles import (
    Q4_GROUP_BYTES,
    Q8_GROUP_BYTES,
    TILE_COLUMNS,
)
from finback.kernels.native import peek_i32, peek_i64, poke_f32, poke_i64
from finback.kernels.simd import LANES

# mypy: disable-error-code="no-untyped-def"
# Everything here is typed by numba, from the int64 job array on.

KEY_CHUNK = 256
"""Tokens whose scores are held at once: 32 KB of float32, the first-level cache."""

PANEL_STEPS = 64
"""Steps of a weight panel that is used at once, 128 KB: more passes over the sums cost more."""

GATE_BYTES = BLOCK_ROWS * TILE_COLUMNS * 4
"""A thread's buffer for a product of gate and up, before its weight panel."""


def scratch_bytes(head_dim: int, largest_k: int) -> int:
    """What a thread needs: buffer and weight panel, or queries, scores, weights, state and mix."""
    panel = GATE_BYTES + largest_k // STEP_K * STEP_BYTES  # gate and up take all steps at once
    attention = BLOCK_ROWS * (8 + 6 * head_dim + 6 * KEY_CHUNK)
    return SCRATCH_FIXED_BYTES + max(panel, attention)


@device_function
def _plain_panel(kind, w, w_step, steps, valid, panel):
    if kind == F16:
        f16_panel_bf16((w, w_step, steps, valid, panel))
    elif kind == BF16:
        bf16_panel_bf16((w, w_step, steps, valid, panel))
    else:
        f32_panel_bf16((w, w_step, steps, valid, panel))


@inlined
def _weight_panel(tiles, tile, start, steps, panel):
    """Unpack some steps of one tile of weights."""
    w, kind = peek_i64(tiles + tile * 16), peek_i64(tiles + tile * 16 + 8)
    if kind == Q4:
        q4_panel_bf16((w + start * Q4_GROUP_BYTES, steps, panel))
    elif kind == Q8:
        q8_panel_bf16((w + start * Q8_GROUP_BYTES, steps, panel))
    else:
        k_bytes = TILE_COLUMNS * (4 if kind == F32 else 2)
        source = w + start * STEP_K * k_bytes
        _plain_panel(kind, source, k_bytes, steps, steps * STEP_K, panel)


@inlined
def _first_needed(job, layer):
    """The first row block of a layer whose result is read: in the last layer only rows that leave are."""
    if layer + 1 < job[Job.NUM_LAYERS]:
        return 0
    first = job[Job.NUM_ROWS]
    for index in range(job[Job.NUM_OUT]):
        first = min(first, peek_i64(job[Job.OUT_ROWS] + index * 8))
    return (first + BLOCK_ROWS - 1) // BLOCK_ROWS if job[Job.NUM_OUT] == 0 else first // BLOCK_ROWS


@inlined
def _blocks_at_once(blocks, num_tiles, num_threads):
    """Row blocks of a unit: all, unless there are too few tiles to keep the threads busy."""
    parts = max(1, min(blocks, (num_threads * 4 + num_tiles - 1) // num_tiles))
    return (blocks + parts - 1) // parts


@device_function
def _multiply_wide(job, phase, num_threads, tiles, num_tiles, x, num_k, out, out_step, adds, begin,
                   panel):  # fmt: skip
    """out (+)= x @ tiles from row block `begin` on; a unit is one tile, unpacked once for its blocks."""
    blocks = (job[Job.NUM_ROWS] + BLOCK_ROWS - 1) // BLOCK_ROWS
    steps = num_k // STEP_K
    at_once = max(1, _blocks_at_once(blocks - begin, num_tiles, num_threads))
    total = num_tiles * ((blocks - begin + at_once - 1) // at_once)
    unit = claim(job, phase, 1)
    while unit < total:
        tile, first = unit % num_tiles, begin + unit // num_tiles * at_once
        for start in range(0, steps, PANEL_STEPS):
            count = min(PANEL_STEPS, steps - start)
            _weight_panel(tiles, tile, start, count, panel)
            adds_now = adds if start == 0 else 1
            for block in range(first, min(first + at_once, blocks)):
                source = x + (block * steps + start) * STEP_BYTES
                target = out + block * BLOCK_ROWS * out_step + tile * TILE_COLUMNS * 4
                amx_product((source, panel, count, target, out_step, adds_now))
        complete(job, phase, 1)
        unit = claim(job, phase, 1)
    wait_until_complete(job, phase, total)


@device_function
def _gate_up_wide(job, phase, num_threads, tiles, begin, buffer, panel):
    """ACTIVATED = silu(gate) * up; a tile holds LANES gates and their ups."""
    rows, inner, steps = job[Job.NUM_ROWS], job[Job.INNER], job[Job.HIDDEN] // STEP_K
    num_tiles, out_steps = inner // LANES, inner // STEP_K
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    at_once = max(1, _blocks_at_once(blocks - begin, num_tiles, num_threads))
    total = num_tiles * ((blocks - begin + at_once - 1) // at_once)
    unit = claim(job, phase, 1)
    while unit < total:
        tile, first = unit % num_tiles, begin + unit // num_tiles * at_once
        _weight_panel(tiles, tile, 0, steps, panel)
        for block in range(first, min(first + at_once, blocks)):
            x = job[Job.NORMED] + block * steps * STEP_BYTES
            amx_product((x, panel, steps, buffer, TILE_COLUMNS * 4, 0))
            out = job[Job.ACTIVATED] + (block * out_steps + tile // 2) * STEP_BYTES + tile % 2 * 32
            silu_mul_bf16((buffer, out, min(BLOCK_ROWS, rows - block * BLOCK_ROWS)))
        complete(job, phase, 1)
        unit = claim(job, phase, 1)
    wait_until_complete(job, phase, total)


@device_function
def _norm_wide(job, phase, begin, weight):
    """NORMED = norm(X) from row block `begin` on, a block at once."""
    rows, hidden = job[Job.NUM_ROWS], job[Job.HIDDEN]
    total = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS - begin
    unit = claim(job, phase, 1)
    while unit < total:
        block = begin + unit
        first = block * BLOCK_ROWS
        target = job[Job.NORMED] + block * (hidden // STEP_K) * STEP_BYTES
        for row in range(min(BLOCK_ROWS, rows - first)):
            x = job[Job.X] + (first + row) * hidden * 4
            norm_bf16((x, weight, target + row * 64, hidden, job[Job.EPS]))
        complete(job, phase, 1)
        unit = claim(job, phase, 1)
    wait_until_complete(job, phase, total)


@inlined
def _padded(tokens):
    return (tokens + STEP_K - 1) // STEP_K * STEP_K


@inlined
def _write_wide_units(job):
    """Row tiles of all sequences, the last ones (with most to read) first: their number.

    A sequence's panels follow those of the one before. Each thread writes the same.
    """
    panels, count = job[Job.KV_PANELS], 0
    token_bytes = job[Job.NUM_KV_HEADS] * job[Job.HEAD_DIM] * 4
    for seq in range(job[Job.NUM_SEQS]):
        first = peek_i32(job[Job.CU_SEQLENS] + seq * 4)
        end = peek_i32(job[Job.CU_SEQLENS] + seq * 4 + 4)
        tiles = (end - first + BLOCK_ROWS - 1) // BLOCK_ROWS
        for tile in range(tiles):
            row = first + (tiles - 1 - tile) * BLOCK_ROWS
            unit = job[Job.UNITS] + count * 32
            poke_i64(unit, seq)
            poke_i64(unit + 8, row)
            poke_i64(unit + 16, min(BLOCK_ROWS, end - row))
            poke_i64(unit + 24, panels)
            count += 1
        panels += _padded(peek_i32(job[Job.CONTEXT_LENS] + seq * 4)) * token_bytes
    return count


@inlined
def _write_kv_units(job):
    """Blocks of all sequences' contexts: their number."""
    panels, count = job[Job.KV_PANELS], 0
    token_bytes = job[Job.NUM_KV_HEADS] * job[Job.HEAD_DIM] * 4
    for seq in range(job[Job.NUM_SEQS]):
        context_len = peek_i32(job[Job.CONTEXT_LENS] + seq * 4)
        for token in range(0, context_len, job[Job.BLOCK_SIZE]):
            unit = job[Job.KV_UNITS] + count * 24
            poke_i64(unit, seq)
            poke_i64(unit + 8, token)
            poke_i64(unit + 16, panels)
            count += 1
        panels += _padded(context_len) * token_bytes
    return count


@device_function
def _unpack_kv(job, phase, layer, num_units):
    """Keys and values of the sequences' contexts into panels; a unit is one block and one head."""
    kv_heads, dim, size = job[Job.NUM_KV_HEADS], job[Job.HEAD_DIM], job[Job.BLOCK_SIZE]
    kind, item = job[Job.KV_KIND], job[Job.KV_ITEM_BYTES]
    total = num_units * kv_heads
    index = claim(job, phase, 1)
    while index < total:
        unit, head = job[Job.KV_UNITS] + index // kv_heads * 24, index % kv_heads
        seq, token = peek_i64(unit), peek_i64(unit + 8)
        context_len = peek_i32(job[Job.CONTEXT_LENS] + seq * 4)
        padded = _padded(context_len)
        block = peek_i32(job[Job.TABLES] + seq * job[Job.TABLE_STEP] + token // size * 4)
        place = (
            layer * job[Job.KV_LAYER_STEP]
            + block * job[Job.KV_BLOCK_BYTES]
            + head * dim * size * item
        )
        keys = peek_i64(unit + 16) + head * padded * dim * 4
        values = keys + padded * dim * 2
        for start in range(0, min(size, padded - token), STEP_K):
            # Keys: 32 tokens are the columns, dimensions the steps.
            source = job[Job.KEYS] + place + start * item
            target = keys + (token + start) // STEP_K * (dim // STEP_K) * STEP_BYTES
            _plain_panel(kind, source, size * item, dim // STEP_K, dim, target)
            # Values: dimensions are the columns, 32 tokens one step.
            source = job[Job.VALUES] + place + start * dim * item
            for column in range(0, dim, TILE_COLUMNS):
                target = (
                    values
                    + (column // TILE_COLUMNS * padded + token + start) // STEP_K * STEP_BYTES
                )
                _plain_panel(
                    kind, source + column * item, dim * item, 1, context_len - token - start, target
                )
        complete(job, phase, 1)
        index = claim(job, phase, 1)
    wait_until_complete(job, phase, total)


@device_function
def _attend_wide(job, phase, num_units, begin, scratch):
    """MIXED = attention of rows from block `begin` on; a unit is up to 32 of a sequence and one head."""
    heads = job[Job.NUM_HEADS]
    total = num_units * heads
    index = claim(job, phase, 1)
    while index < total:
        unit = job[Job.UNITS] + index // heads * 32
        row, count = peek_i64(unit + 8), peek_i64(unit + 16)
        if row + count > begin * BLOCK_ROWS:
            panels = peek_i64(unit + 24)
            _attend_tile(job, peek_i64(unit), row, count, panels, index % heads, scratch)
        complete(job, phase, 1)
        index = claim(job, phase, 1)
    wait_until_complete(job, phase, total)


@inlined
def _attend_tile(job, seq, first_row, num_rows, panels, head, scratch):
    heads, kv_heads, dim = job[Job.NUM_HEADS], job[Job.NUM_KV_HEADS], job[Job.HEAD_DIM]
    last = peek_i32(job[Job.CU_SEQLENS] + seq * 4 + 4) - 1
    context_len = peek_i32(job[Job.CONTEXT_LENS] + seq * 4)
    seen = context_len - (last - first_row)
    padded = _padded(context_len)
    dim_steps = dim // STEP_K
    keys = panels + head // (heads // kv_heads) * padded * dim * 4
    values = keys + padded * dim * 2
    state = scratch + SCRATCH_FIXED_BYTES
    queries = state + BLOCK_ROWS * 8
    mix = queries + BLOCK_ROWS * dim * 2
    scores = mix + BLOCK_ROWS * dim * 4
    weights = scores + BLOCK_ROWS * KEY_CHUNK * 4
    row_bytes = (heads + 2 * kv_heads) * dim * 4
    source = job[Job.QKV] + first_row * row_bytes + head * dim * 4
    for row in range(BLOCK_ROWS):
        # Rows past the last are copies of it: finite, and not read.
        scaled_bf16(
            (
                source + min(row, num_rows - 1) * row_bytes,
                queries + row * 64,
                dim,
                job[Job.SCALE_LOG2],
            )
        )
        poke_f32(state + row * 8, -_INFINITY)
        poke_f32(state + row * 8 + 4, 0.0)
    for at in range(0, BLOCK_ROWS * dim * 4, 8):
        poke_i64(mix + at, 0)
    end = _padded(seen + num_rows - 1)
    for start in range(0, end, KEY_CHUNK):
        columns = min(KEY_CHUNK, end - start)
        for column in range(0, columns, TILE_COLUMNS):
            panel = keys + (start + column) // STEP_K * dim_steps * STEP_BYTES
            amx_product((queries, panel, dim_steps, scores + column * 4, KEY_CHUNK * 4, 0))
        softmax_bf16(
            (scores, KEY_CHUNK * 4, weights, BLOCK_ROWS, seen - start, columns, state, mix, dim)
        )
        for column in range(0, dim, TILE_COLUMNS):
            panel = values + (column // TILE_COLUMNS * padded + start) // STEP_K * STEP_BYTES
            amx_product((weights, panel, columns // STEP_K, mix + column * 4, dim * 4, 1))
    for row in range(num_rows):
        at = first_row + row
        block = job[Job.MIXED] + at // BLOCK_ROWS * (heads * dim_steps) * STEP_BYTES
        target = block + head * dim_steps * STEP_BYTES + at % BLOCK_ROWS * 64
        divided_bf16((mix + row * dim * 4, target, dim, state + row * 8 + 4))


_INFINITY = float("inf")


@device_function
def run_wide(thread, num_threads, job):
    """All layers over the rows of prompt chunks."""
    scratch = job[Job.SCRATCH] + thread * job[Job.SCRATCH_STEP]
    buffer = scratch + SCRATCH_FIXED_BYTES
    panel = buffer + GATE_BYTES
    hidden, inner = job[Job.HIDDEN], job[Job.INNER]
    q_size = job[Job.NUM_HEADS] * job[Job.HEAD_DIM]
    qkv_size = q_size + 2 * job[Job.NUM_KV_HEADS] * job[Job.HEAD_DIM]
    hidden_tiles, qkv_tiles = hidden // TILE_COLUMNS, qkv_size // TILE_COLUMNS
    num_units, num_kv_units = _write_wide_units(job), _write_kv_units(job)
    amx_start((scratch,))
    phase = 0
    if job[Job.FIRST_LAYER] == 0:
        embed_rows(job, phase, num_threads)
    mark(thread, job, phase)
    phase += 1
    for index in range(job[Job.FIRST_LAYER], job[Job.END_LAYER]):
        layer = job[Job.LAYERS] + index * Layer.SIZE * 8
        begin = _first_needed(job, index)
        _norm_wide(job, phase, 0, peek_i64(layer + Layer.ATTN_NORM * 8))
        mark(thread, job, phase)
        phase += 1
        _multiply_wide(job, phase, num_threads, peek_i64(layer + Layer.QKV * 8), qkv_tiles,
                       job[Job.NORMED], hidden, job[Job.QKV], qkv_size * 4, 0, 0, panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        rotate_and_store(job, phase, num_threads, index, peek_i64(layer + Layer.Q_NORM * 8),
                         peek_i64(layer + Layer.K_NORM * 8))  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        _unpack_kv(job, phase, index, num_kv_units)
        mark(thread, job, phase)
        phase += 1
        _attend_wide(job, phase, num_units, begin, scratch)
        mark(thread, job, phase)
        phase += 1
        _multiply_wide(job, phase, num_threads, peek_i64(layer + Layer.O * 8), hidden_tiles,
                       job[Job.MIXED], q_size, job[Job.X], hidden * 4, 1, begin, panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        _norm_wide(job, phase, begin, peek_i64(layer + Layer.MLP_NORM * 8))
        mark(thread, job, phase)
        phase += 1
        _gate_up_wide(job, phase, num_threads, peek_i64(layer + Layer.GATE_UP * 8), begin, buffer,
                      panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
        _multiply_wide(job, phase, num_threads, peek_i64(layer + Layer.DOWN * 8), hidden_tiles,
                       job[Job.ACTIVATED], inner, job[Job.X], hidden * 4, 1, begin, panel)  # fmt: skip
        mark(thread, job, phase)
        phase += 1
    if job[Job.END_LAYER] == job[Job.NUM_LAYERS]:
        norm_out_rows(job, phase, num_threads, False)
    mark(thread, job, phase)
    amx_stop((scratch,))
