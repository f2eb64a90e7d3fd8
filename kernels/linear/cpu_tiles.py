"""Matrix tiles for the CPU: out[rows, columns] = sum over k of x[row, k] * w[k, column].

Weights lie in column tiles of TILE_COLUMNS (see `cpu_packing`). Every output is one chain of fused
multiply-adds in the order of k over float32 weights, whatever the tile's height and whether weights
were unpacked into a panel or in registers, so a row's bits do not depend on the rows beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from finback.kernels.simd import (
    COLUMN_VECTORS,
    F32,
    I8,
    I64,
    LANES,
    MAX_TILE_ROWS,
    Emitter,
    Value,
    kernel,
)

TILE_COLUMNS: Final = COLUMN_VECTORS * LANES
GROUP: Final = 32
"""k of one quantisation group."""

Q4_GROUP_BYTES: Final = TILE_COLUMNS * (2 + 2 + GROUP // 2)
Q8_GROUP_BYTES: Final = TILE_COLUMNS * (2 + GROUP)

_UNROLL: Final = 2
_AHEAD: Final = 2048
_WIDTH: Final = LANES * 4

Loader = Callable[[Emitter, Value, int], Value]


class _Sums:
    """Accumulators of rows x vectors, and the addresses of their rows."""

    def __init__(self, e: Emitter, x: Value, x_step: Value, rows: int, vectors: int) -> None:
        self.e, self.rows, self.vectors = e, rows, vectors
        self.xs = [e.b.add(x, e.b.mul(x_step, I64(row))) for row in range(rows)]
        self.places = [e.variable(e.const(0.0)) for _ in range(rows * vectors)]

    def add(self, k: Value, weights: Sequence[Value], offset: int = 0) -> None:
        """One k: x[row, k + offset] * weights onto all accumulators."""
        b = self.e.b
        at = b.mul(k, I64(4))
        for row in range(self.rows):
            value = self.e.splat(self.e.load(b.add(self.xs[row], at), F32, offset * 4))
            for vector in range(self.vectors):
                place = self.places[row * self.vectors + vector]
                b.store(self.e.fma(value, weights[vector], b.load(place)), place)

    def start_from(self, outs: Sequence[Value], condition: Value) -> None:
        """If the condition holds, begin with what out holds."""
        with self.e.b.if_then(condition):
            for row in range(self.rows):
                for vector in range(self.vectors):
                    value = self.e.load_f32(outs[row], vector * _WIDTH)
                    self.e.b.store(value, self.places[row * self.vectors + vector])

    def write(self, outs: Sequence[Value]) -> None:
        """Store all accumulators."""
        for row in range(self.rows):
            for vector in range(self.vectors):
                value = self.e.b.load(self.places[row * self.vectors + vector])
                self.e.store(value, outs[row], vector * _WIDTH)


def plain_tile(load: Loader, item_bytes: int, name: str, num_tiles: int = 1) -> Any:
    """A kernel of plain weights, up to MAX_TILE_ROWS x TILE_COLUMNS.

    With two tiles (neighbours in a row of w) it is twice as wide and takes half as many rows: as many
    chains of additions in flight, which few rows alone would not give.

    Arguments: rows, x, bytes between rows of x, w, bytes between k of w, number of k, out, bytes
    between rows of out, 1 to start from out's values. `load(emitter, address, offset)` gives a vector
    of weights of `item_bytes` each.
    """

    def emit(e: Emitter, num_rows: Value, *args: Value) -> None:
        with e.cases(num_rows, MAX_TILE_ROWS // num_tiles) as cases:
            for rows, block in cases:
                with block:
                    _emit_plain(e, rows, COLUMN_VECTORS * num_tiles, load, item_bytes, *args)

    return kernel(emit, name)


def _emit_plain(e: Emitter, rows: int, vectors: int, load: Loader, item_bytes: int, x: Value, x_step: Value,
                w: Value, w_step: Value, count: Value, out: Value, out_step: Value,
                adds: Value) -> None:  # fmt: skip
    b = e.b
    outs = [b.add(out, b.mul(out_step, I64(row))) for row in range(rows)]
    sums = _Sums(e, x, x_step, rows, vectors)
    sums.start_from(outs, b.icmp_signed("!=", adds, I64(0)))

    def step(k: Value, part: int) -> None:
        at = b.add(w, b.mul(w_step, b.add(k, I64(part))))
        weights = [load(e, at, v * LANES * item_bytes) for v in range(vectors)]
        sums.add(k, weights, part)

    whole = b.sdiv(count, I64(_UNROLL))
    with e.loop(whole) as index:
        for part in range(_UNROLL):
            step(b.mul(index, I64(_UNROLL)), part)
    done = b.mul(whole, I64(_UNROLL))
    with e.loop(b.sub(count, done)) as rest:
        step(b.add(done, rest), 0)
    sums.write(outs)


def q4_scales(e: Emitter, group: Value, vector: int) -> tuple[Value, Value]:
    """Scale and minimum of a vector of columns in a group."""
    scale = e.load_f16(group, vector * LANES * 2)
    return scale, e.load_f16(group, (TILE_COLUMNS + vector * LANES) * 2)


def q4_pair(e: Emitter, pair: Value, vector: int, scales: tuple[Value, Value]) -> list[Value]:
    """Weights of two neighbouring k: the low and the high halves of bytes."""
    b = e.b
    raw = b.zext(e.load(pair, e.vector_of(I8), vector * LANES), e.i32)
    numbers = [e.small_number(raw), e.small_number(b.lshr(raw, e.iconst(4)))]
    return [e.fma(number, scales[0], scales[1]) for number in numbers]


def q8_row(e: Emitter, row: Value, vector: int, scale: Value) -> Value:
    """Weights of one k."""
    raw = e.b.sext(e.load(row, e.vector_of(I8), vector * LANES), e.i32)
    return e.b.fmul(e.b.sitofp(raw, e.f32), scale)


def _prefetch(e: Emitter, tiles: Sequence[Value], w_step: Value, group_bytes: int) -> None:
    """Fetch the same groups of the tiles that come next: tiles are too short for the hardware to see."""
    ahead = e.b.mul(w_step, I64(len(tiles))) if len(tiles) > 1 else I64(_AHEAD)
    for at in tiles:
        for offset in range(0, group_bytes, 64):
            e.prefetch(e.b.add(at, ahead), offset)


def q4_rows(num_rows: int, num_tiles: int) -> Any:
    """A kernel of `num_tiles` neighbouring 4-bit tiles, unpacked in registers: for few rows.

    Arguments: x, bytes between rows, first tile, bytes between tiles, groups, out, bytes between rows.
    """

    def emit(e: Emitter, x: Value, x_step: Value, w: Value, w_step: Value, groups: Value,
             out: Value, out_step: Value) -> None:  # fmt: skip
        b = e.b
        outs = [b.add(out, b.mul(out_step, I64(row))) for row in range(num_rows)]
        vectors = [(t, v) for t in range(num_tiles) for v in range(COLUMN_VECTORS)]
        sums = _Sums(e, x, x_step, num_rows, len(vectors))
        with e.loop(groups) as index:
            start = b.add(w, b.mul(index, I64(Q4_GROUP_BYTES)))
            tiles = [b.add(start, b.mul(w_step, I64(t))) for t in range(num_tiles)]
            scales = [q4_scales(e, tiles[t], v) for t, v in vectors]
            packed = [b.add(at, I64(TILE_COLUMNS * 4)) for at in tiles]
            _prefetch(e, tiles, w_step, Q4_GROUP_BYTES)
            with e.loop(I64(GROUP // 4)) as quad:
                for half in range(2):
                    offset = b.add(b.mul(quad, I64(2 * TILE_COLUMNS)), I64(half * TILE_COLUMNS))
                    pairs = [
                        q4_pair(e, b.add(packed[t], offset), v, scales[i])
                        for i, (t, v) in enumerate(vectors)
                    ]
                    k = b.add(b.mul(index, I64(GROUP)), b.mul(quad, I64(4)))
                    for part in range(2):
                        sums.add(k, [pair[part] for pair in pairs], half * 2 + part)
        sums.write(outs)

    return kernel(emit, f"{num_rows}x{num_tiles}")


def q8_rows(num_rows: int, num_tiles: int) -> Any:
    """Like `q4_rows` for 8-bit tiles."""

    def emit(e: Emitter, x: Value, x_step: Value, w: Value, w_step: Value, groups: Value,
             out: Value, out_step: Value) -> None:  # fmt: skip
        b = e.b
        outs = [b.add(out, b.mul(out_step, I64(row))) for row in range(num_rows)]
        vectors = [(t, v) for t in range(num_tiles) for v in range(COLUMN_VECTORS)]
        sums = _Sums(e, x, x_step, num_rows, len(vectors))
        with e.loop(groups) as index:
            start = b.add(w, b.mul(index, I64(Q8_GROUP_BYTES)))
            tiles = [b.add(start, b.mul(w_step, I64(t))) for t in range(num_tiles)]
            scales = [e.load_f16(tiles[t], v * LANES * 2) for t, v in vectors]
            packed = [b.add(at, I64(TILE_COLUMNS * 2)) for at in tiles]
            _prefetch(e, tiles, w_step, Q8_GROUP_BYTES)
            with e.loop(I64(GROUP // 4)) as quad:
                k = b.add(b.mul(index, I64(GROUP)), b.mul(quad, I64(4)))
                for part in range(4):
                    offset = b.mul(b.add(b.mul(quad, I64(4)), I64(part)), I64(TILE_COLUMNS))
                    weights = [
                        q8_row(e, b.add(packed[t], offset), v, scales[i])
                        for i, (t, v) in enumerate(vectors)
                    ]
                    sums.add(k, weights, part)
        sums.write(outs)

    return kernel(emit, f"{num_rows}x{num_tiles}")


def _emit_q4_panel(e: Emitter, w: Value, groups: Value, panel: Value) -> None:
    b = e.b
    with e.loop(groups) as index:
        at = b.add(w, b.mul(index, I64(Q4_GROUP_BYTES)))
        scales = [q4_scales(e, at, v) for v in range(COLUMN_VECTORS)]
        target = b.add(panel, b.mul(index, I64(GROUP * TILE_COLUMNS * 4)))
        with e.loop(I64(GROUP // 2)) as pair:
            source = b.add(b.add(at, I64(TILE_COLUMNS * 4)), b.mul(pair, I64(TILE_COLUMNS)))
            rows = b.add(target, b.mul(pair, I64(2 * TILE_COLUMNS * 4)))
            for v in range(COLUMN_VECTORS):
                for part, value in enumerate(q4_pair(e, source, v, scales[v])):
                    e.store(value, rows, (part * TILE_COLUMNS + v * LANES) * 4)


def _emit_q8_panel(e: Emitter, w: Value, groups: Value, panel: Value) -> None:
    b = e.b
    with e.loop(groups) as index:
        at = b.add(w, b.mul(index, I64(Q8_GROUP_BYTES)))
        scales = [e.load_f16(at, v * LANES * 2) for v in range(COLUMN_VECTORS)]
        target = b.add(panel, b.mul(index, I64(GROUP * TILE_COLUMNS * 4)))
        with e.loop(I64(GROUP)) as k:
            source = b.add(b.add(at, I64(TILE_COLUMNS * 2)), b.mul(k, I64(TILE_COLUMNS)))
            row = b.add(target, b.mul(k, I64(TILE_COLUMNS * 4)))
            for v in range(COLUMN_VECTORS):
                e.store(q8_row(e, source, v, scales[v]), row, v * LANES * 4)


q4_panel: Final = kernel(_emit_q4_panel)
"""Unpack groups of a 4-bit tile. Arguments: w, groups, panel (float32 [k][TILE_COLUMNS])."""

q8_panel: Final = kernel(_emit_q8_panel)
"""Unpack groups of an 8-bit tile. Arguments: w, groups, panel."""

f32_tile: Final = plain_tile(Emitter.load_f32, 4, "f32")
f16_tile: Final = plain_tile(Emitter.load_f16, 2, "f16")
bf16_tile: Final = plain_tile(Emitter.load_bf16, 2, "bf16")

f32_wide: Final = plain_tile(Emitter.load_f32, 4, "f32x2", 2)
f16_wide: Final = plain_tile(Emitter.load_f16, 2, "f16x2", 2)
bf16_wide: Final = plain_tile(Emitter.load_bf16, 2, "bf16x2", 2)
