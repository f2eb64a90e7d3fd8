"""Products of many rows in bfloat16 on AMX tiles: for prompt chunks in fast mode.

A step over k is 32 long. Rows lie in blocks of 32, each [step][32 rows][32 k] bfloat16; weights are
unpacked into panels of 32 columns, [step][2 halves][16 pairs of k][16 columns][2 k]. So an operand's
step is 2 KB without gaps, and a product of 32 rows and 32 columns keeps four accumulators of float32
in tile registers. Sums run over k in order: a row's bits do not depend on the rows beside it.

Instructions as in Intel's Architecture Instruction Set Extensions Programming Reference, chapter 3.
"""

from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils

from finback.kernels.linear.cpu_tiles import (
    GROUP,
    Q4_GROUP_BYTES,
    Q8_GROUP_BYTES,
    TILE_COLUMNS,
    Loader,
    q4_pair,
    q4_scales,
    q8_row,
)
from finback.kernels.simd import I8, I32, I64, LANES, Emitter, Value, kernel

BLOCK_ROWS: Final = 32
STEP_K: Final = 32
STEP_BYTES: Final = 2048
"""Of one step of a block of rows, or of a panel."""

_HALF_BYTES: Final = 1024
_LINE: Final = 64


def _amx(e: Emitter, name: str, *args: Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    e.b.call(cgutils.get_or_insert_function(e.b.module, kind, f"llvm.x86.{name}"), args)


def _pointer(e: Emitter, address: Value, offset: int = 0) -> Value:
    where = e.b.add(address, I64(offset)) if offset else address
    return e.b.inttoptr(where, I8.as_pointer())


def _emit_start(e: Emitter, scratch: Value) -> None:
    # Palette 1; all eight tiles have 16 rows of 64 bytes.
    words = [1, 0, 0, 0, *[0x00400040] * 4, *[0] * 4, *[0x10101010] * 2, 0, 0]
    config = ir.Constant(ir.VectorType(I32, 16), words)
    _amx(e, "sttilecfg", _pointer(e, scratch, _LINE))
    e.store(config, scratch)
    _amx(e, "ldtilecfg", _pointer(e, scratch))


def _emit_stop(e: Emitter, scratch: Value) -> None:
    _amx(e, "ldtilecfg", _pointer(e, scratch, _LINE))


amx_start: Final = kernel(_emit_start)
"""Set this thread's tile registers up. Argument: 128 bytes to write to."""

amx_stop: Final = kernel(_emit_stop)
"""Set them up as they were before. Argument: as of `amx_start`.

Other libraries configure a thread once and rely on it (llama.cpp, oneDNN); where nothing was, nothing
is again, so that the system need not keep the registers.
"""


def _emit_product(e: Emitter, x: Value, panel: Value, steps: Value, out: Value, out_step: Value,
                  adds: Value) -> None:  # fmt: skip
    b = e.b
    lower = b.add(out, b.mul(out_step, I64(16)))
    outs = [(lower if tile >= 2 else out, tile % 2 * _LINE) for tile in range(4)]
    with b.if_else(b.icmp_signed("!=", adds, I64(0))) as (then, otherwise):
        with then:
            for tile, (at, offset) in enumerate(outs):
                _amx(e, "tileloadd64", I8(tile), _pointer(e, at, offset), out_step)
        with otherwise:
            for tile in range(4):
                _amx(e, "tilezero", I8(tile))
    with e.loop(steps) as step:
        at = b.mul(step, I64(STEP_BYTES))
        rows, columns = b.add(x, at), b.add(panel, at)

        def load(tile: int, address: Value, half: int) -> None:
            where = _pointer(e, address, half * _HALF_BYTES)
            _amx(e, "tileloadd64", I8(tile), where, I64(_LINE))

        def multiply(tile: int, row: int, column: int) -> None:
            _amx(e, "tdpbf16ps", I8(tile), I8(row), I8(column))

        # Products begin as soon as their operands are there.
        load(6, columns, 0)
        load(4, rows, 0)
        multiply(0, 4, 6)
        load(7, columns, 1)
        multiply(1, 4, 7)
        load(5, rows, 1)
        multiply(2, 5, 6)
        multiply(3, 5, 7)
    for tile, (at, offset) in enumerate(outs):
        _amx(e, "tilestored64", I8(tile), _pointer(e, at, offset), out_step)


amx_product: Final = kernel(_emit_product)
"""32 rows times 32 columns.

Arguments: block of rows, panel, steps, out (float32), bytes between its rows, 1 to add to out.
"""


# -- unpacking into panels


def pair_bits(e: Emitter, even: Value, odd: Value) -> Value:
    """Two float32 vectors as one of bfloat16 pairs, the even one low; ties away from zero."""
    b = e.b
    half = e.iconst(0x8000)
    low = b.lshr(b.add(b.bitcast(even, e.i32), half), e.iconst(16))
    high = b.and_(b.add(b.bitcast(odd, e.i32), half), e.iconst(0xFFFF0000))
    return b.or_(low, high)


def _store_pair(e: Emitter, target: Value, half: int, even: Value, odd: Value) -> None:
    e.store(pair_bits(e, even, odd), target, half * _HALF_BYTES)


def _emit_q4(e: Emitter, w: Value, groups: Value, panel: Value) -> None:
    b = e.b
    with e.loop(groups) as index:
        at = b.add(w, b.mul(index, I64(Q4_GROUP_BYTES)))
        target = b.add(panel, b.mul(index, I64(STEP_BYTES)))
        scales = [q4_scales(e, at, half) for half in range(2)]
        with e.loop(I64(GROUP // 2)) as pair:
            source = b.add(b.add(at, I64(TILE_COLUMNS * 4)), b.mul(pair, I64(TILE_COLUMNS)))
            place = b.add(target, b.mul(pair, I64(_LINE)))
            for half in range(2):
                even, odd = q4_pair(e, source, half, scales[half])
                _store_pair(e, place, half, even, odd)


def _emit_q8(e: Emitter, w: Value, groups: Value, panel: Value) -> None:
    b = e.b
    with e.loop(groups) as index:
        at = b.add(w, b.mul(index, I64(Q8_GROUP_BYTES)))
        target = b.add(panel, b.mul(index, I64(STEP_BYTES)))
        scales = [e.load_f16(at, half * LANES * 2) for half in range(2)]
        with e.loop(I64(GROUP // 2)) as pair:
            source = b.add(b.add(at, I64(TILE_COLUMNS * 2)), b.mul(pair, I64(2 * TILE_COLUMNS)))
            place = b.add(target, b.mul(pair, I64(_LINE)))
            for half in range(2):
                even, odd = (
                    q8_row(e, b.add(source, I64(k * TILE_COLUMNS)), half, scales[half])
                    for k in range(2)
                )
                _store_pair(e, place, half, even, odd)


q4_panel_bf16: Final = kernel(_emit_q4)
q8_panel_bf16: Final = kernel(_emit_q8)
"""Unpack groups of a quantised tile. Arguments: w, groups, panel."""


def _emit_plain(e: Emitter, load: Loader, item_bytes: int, w: Value, w_step: Value, steps: Value,
                valid: Value, panel: Value) -> None:  # fmt: skip
    b = e.b
    zero = e.const(0.0)

    def row(k: Value, half: int) -> Value:
        value = load(e, b.add(w, b.mul(w_step, k)), half * LANES * item_bytes)
        return b.select(b.icmp_signed("<", k, valid), value, zero)

    with e.loop(b.mul(steps, I64(STEP_K // 2))) as pair:
        k = b.mul(pair, I64(2))
        step, line = b.sdiv(pair, I64(STEP_K // 2)), b.srem(pair, I64(STEP_K // 2))
        place = b.add(panel, b.add(b.mul(step, I64(STEP_BYTES)), b.mul(line, I64(_LINE))))
        for half in range(2):
            _store_pair(e, place, half, row(k, half), row(b.add(k, I64(1)), half))


def _plain(load: Loader, item_bytes: int, name: str) -> Any:
    def emit(e: Emitter, *args: Value) -> None:
        _emit_plain(e, load, item_bytes, *args)

    return kernel(emit, name)


f32_panel_bf16: Final = _plain(Emitter.load_f32, 4, "f32")
f16_panel_bf16: Final = _plain(Emitter.load_f16, 2, "f16")
bf16_panel_bf16: Final = _plain(Emitter.load_bf16, 2, "bf16")
"""Arguments: w, bytes between its k, steps, how many k are real (the others count as zero), panel."""
