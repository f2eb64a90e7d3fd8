"""Attention of a few query rows over the blocks of one key/value head. For other compiled code.

Blocks: keys [head_dim][block_size] (tokens innermost), values [block_size][head_dim]. Scores are a
matrix tile with k = dimension, the mix of values one with k = token, so both use the tiles of
`linear`. A row's scores, its sum and its mix run over its context in order, whatever rows and
chunks are computed beside it: its bits depend on its context alone.
"""

from typing import Final

from finback.kernels.compiled import inlined
from finback.kernels.linear.cpu_multiply import WIDE_ROWS, plain_rows, wide_rows
from finback.kernels.linear.cpu_tiles import TILE_COLUMNS
from finback.kernels.native import peek_i32
from finback.kernels.simd import F32, I64, LANES, Emitter, Value, kernel

# mypy: disable-error-code="no-untyped-def"
# Compiled functions are typed by numba.


def _emit_softmax(e: Emitter, scores: Value, length: Value, padded: Value, sum_at: Value) -> None:
    b = e.b
    lane_ids = e.b.sext(e.lane_numbers(), e.i64)
    vectors = b.sdiv(padded, I64(LANES))
    highest = e.variable(e.const(float("-inf")))

    def masked(index: Value) -> tuple[Value, Value]:
        at = b.add(scores, b.mul(index, I64(LANES * 4)))
        position = b.add(e.splat(b.mul(index, I64(LANES))), lane_ids)
        is_seen = b.icmp_signed("<", position, e.splat(length))
        return at, b.select(is_seen, e.load_f32(at), e.const(float("-inf")))

    with e.loop(vectors) as index:
        _, value = masked(index)
        b.store(e.maximum(value, b.load(highest)), highest)
    top = e.splat(e.reduce(b.load(highest), e.scalar_maximum))
    total = e.variable(e.const(0.0))
    with e.loop(vectors) as index:
        at, value = masked(index)
        weight = e.exp(b.fsub(value, top))
        e.store(weight, at)
        b.store(b.fadd(b.load(total), weight), total)
    e.store(e.sum(b.load(total)), sum_at, align=4)


softmax_row: Final = kernel(_emit_softmax)
"""scores -> exp(scores - max) over the first `length`, zero up to `padded`; their sum to an address.

Arguments: scores (float32), length, padded (a multiple of LANES), address of the sum.
"""


def _emit_scaled(
    e: Emitter, source: Value, target: Value, count: Value, factor_bits: Value
) -> None:
    b = e.b
    factor = e.splat(e.f32_of_bits(factor_bits))
    with e.loop(b.sdiv(count, I64(LANES))) as index:
        at = b.mul(index, I64(LANES * 4))
        e.store(b.fmul(e.load_f32(b.add(source, at)), factor), b.add(target, at))


scaled_copy: Final = kernel(_emit_scaled)
"""target = source * factor. Arguments: source, target, count (multiple of LANES), bits of factor."""


def _emit_divided(
    e: Emitter, source: Value, target: Value, count: Value, divisor_at: Value
) -> None:
    b = e.b
    factor = e.splat(b.fdiv(F32(1.0), e.load(divisor_at, F32, align=4)))
    with e.loop(b.sdiv(count, I64(LANES))) as index:
        at = b.mul(index, I64(LANES * 4))
        e.store(b.fmul(e.load_f32(b.add(source, at)), factor), b.add(target, at))


divided_copy: Final = kernel(_emit_divided)
"""target = source / the float32 at an address. Arguments: source, target, count, address."""


@inlined
def scores_over_blocks(kind, item_bytes, num_rows, q, q_step, keys, block_bytes, head_offset, table,
                       block_size, head_dim, length, scores, scores_step):  # fmt: skip
    """scores[row, token] = q[row] . key[token] for all tokens of the blocks up to `length`."""
    for start in range(0, length, block_size):
        block = peek_i32(table + start // block_size * 4)
        base = keys + block * block_bytes + head_offset
        end = min(block_size, length - start)
        column = 0
        while column < end:
            w, out = base + column * item_bytes, scores + (start + column) * 4
            w_step = block_size * item_bytes
            if num_rows <= WIDE_ROWS and column + TILE_COLUMNS < end:
                wide_rows(kind, (num_rows, q, q_step, w, w_step, head_dim, out, scores_step, 0))
                column += 2 * TILE_COLUMNS
            else:
                plain_rows(kind, num_rows, q, q_step, w, w_step, head_dim, out, scores_step, 0)
                column += TILE_COLUMNS


@inlined
def mix_over_blocks(kind, item_bytes, num_rows, scores, scores_step, values, block_bytes, head_offset,
                    table, block_size, head_dim, length, out, out_step):  # fmt: skip
    """out[row] = sum over tokens of scores[row, token] * value[token]."""
    for start in range(0, length, block_size):
        block = peek_i32(table + start // block_size * 4)
        base = values + block * block_bytes + head_offset
        count = min(block_size, length - start)
        adds = 1 if start else 0
        x, w_step = scores + start * 4, head_dim * item_bytes
        column = 0
        while column < head_dim:
            w, target = base + column * item_bytes, out + column * 4
            if num_rows <= WIDE_ROWS and column + TILE_COLUMNS < head_dim:
                wide_rows(
                    kind, (num_rows, x, scores_step, w, w_step, count, target, out_step, adds)
                )
                column += 2 * TILE_COLUMNS
            else:
                plain_rows(kind, num_rows, x, scores_step, w, w_step, count, target, out_step, adds)
                column += TILE_COLUMNS
