"""A row of the embedding table, which lies in the column tiles of the (tied) head."""

from finback.kernels.compiled import inlined
from finback.kernels.linear.cpu_packing import BF16, F32, Q4, Q8
from finback.kernels.linear.cpu_tiles import (
    GROUP,
    Q4_GROUP_BYTES,
    Q8_GROUP_BYTES,
    TILE_COLUMNS,
)
from finback.kernels.native import (
    peek_bf16,
    peek_byte,
    peek_f16,
    peek_f32,
    peek_i64,
    poke_f32,
)

# mypy: disable-error-code="no-untyped-def"


@inlined
def embed_row(tiles, token, num_k, out):
    """Column `token` of the tiles, all k, as float32."""
    entry = tiles + token // TILE_COLUMNS * 16
    w, kind, lane = peek_i64(entry), peek_i64(entry + 8), token % TILE_COLUMNS
    for k in range(num_k):
        poke_f32(out + k * 4, _weight(kind, w, k, lane))


@inlined
def _weight(kind, w, k, lane):
    group = k // GROUP
    if kind == Q8:
        start = w + group * Q8_GROUP_BYTES
        value = peek_byte(start + 2 * TILE_COLUMNS + k % GROUP * TILE_COLUMNS + lane)
        signed = value - 256 if value > 127 else value
        return signed * peek_f16(start + 2 * lane)
    if kind == Q4:
        start = w + group * Q4_GROUP_BYTES
        byte = peek_byte(start + 4 * TILE_COLUMNS + k % GROUP // 2 * TILE_COLUMNS + lane)
        value = byte >> 4 if k % 2 else byte & 15
        return value * peek_f16(start + 2 * lane) + peek_f16(start + 2 * (TILE_COLUMNS + lane))
    if kind == F32:
        return peek_f32(w + (k * TILE_COLUMNS + lane) * 4)
    if kind == BF16:
        return peek_bf16(w + (k * TILE_COLUMNS + lane) * 2)
    return peek_f16(w + (k * TILE_COLUMNS + lane) * 2)
