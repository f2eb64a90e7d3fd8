"""Row kernels that write blocks of rows in bfloat16 (see `cpu_amx`), for prompt chunks in fast mode."""

from typing import Final

from llvmlite import ir

from finback.kernels.linear.cpu_amx import STEP_BYTES, STEP_K
from finback.kernels.simd import F32, I16, I32, I64, LANES, Emitter, Value, kernel

_LOG2_E: Final = 1.44269504088896341

# 2**f for |f| <= 1/2, exact at 0, minimax by reweighted least squares; relative error 3e-6.
_EXP2: Final = (0.00958285, 0.05590642, 0.24024099, 0.69312419, 1.0)
_MAGIC: Final = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer in the low bits


def exp2(e: Emitter, a: Value) -> Value:
    """2**a for a <= 127; at least 2**-126. NaN stays NaN."""
    b = e.b
    low = e.const(-126.0)
    x = b.select(b.fcmp_ordered("<", a, low), low, a)
    rounded = b.fadd(x, e.const(_MAGIC))
    fraction = b.fsub(x, b.fsub(rounded, e.const(_MAGIC)))
    poly = e.const(_EXP2[0])
    for coefficient in _EXP2[1:]:
        poly = e.fma(poly, fraction, e.const(coefficient))
    power = b.shl(b.bitcast(rounded, e.i32), e.iconst(23))
    return b.bitcast(b.add(b.bitcast(poly, e.i32), power), e.f32)


def upper_halves(e: Emitter, first: Value, second: Value) -> Value:
    """Two float32 vectors, rounded (ties away from zero), as one of twice as many bfloat16."""
    b = e.b
    words = ir.VectorType(I16, 2 * LANES)
    both = [
        b.bitcast(b.add(b.bitcast(value, e.i32), e.iconst(0x8000)), words)
        for value in (first, second)
    ]
    mask = ir.Constant(ir.VectorType(I32, 2 * LANES), [2 * i + 1 for i in range(2 * LANES)])
    return b.shuffle_vector(both[0], both[1], mask)


def rounded(e: Emitter, value: Value) -> Value:
    """Float32 rounded to what bfloat16 can hold, as `upper_halves` rounds (and leaves it)."""
    b = e.b
    bits = b.and_(b.add(b.bitcast(value, e.i32), e.iconst(0x8000)), e.iconst(-0x10000))
    return b.bitcast(bits, e.f32)


def _two(e: Emitter, source: Value) -> tuple[Value, Value]:
    return e.load_f32(source), e.load_f32(source, LANES * 4)


def _emit_norm(e: Emitter, x: Value, weight: Value, out: Value, count: Value,
               eps_bits: Value) -> None:  # fmt: skip
    b = e.b
    squares = [e.variable(e.const(0.0)) for _ in range(2)]
    steps = b.sdiv(count, I64(STEP_K))
    with e.loop(steps) as step:
        for value, place in zip(_two(e, b.add(x, b.mul(step, I64(128)))), squares, strict=True):
            b.store(e.fma(value, value, b.load(place)), place)
    total = e.sum(b.fadd(b.load(squares[0]), b.load(squares[1])))
    mean = b.fdiv(total, b.sitofp(count, F32))
    root = e.call("llvm.sqrt.f32", F32, b.fadd(mean, e.f32_of_bits(eps_bits)))
    scale = e.splat(b.fdiv(F32(1.0), root))
    with e.loop(steps) as step:
        at = b.mul(step, I64(128))
        values, weights = _two(e, b.add(x, at)), _two(e, b.add(weight, at))
        first, second = (
            b.fmul(b.fmul(value, scale), w) for value, w in zip(values, weights, strict=True)
        )
        e.store(upper_halves(e, first, second), b.add(out, b.mul(step, I64(STEP_BYTES))))


norm_bf16: Final = kernel(_emit_norm)
"""out = x / rms(x) * weight. Arguments: x, weight, out (a row of a block), count, bits of eps."""


def _emit_scaled(e: Emitter, x: Value, out: Value, count: Value, factor_bits: Value) -> None:
    b = e.b
    factor = e.splat(e.f32_of_bits(factor_bits))
    with e.loop(b.sdiv(count, I64(STEP_K))) as step:
        first, second = (b.fmul(v, factor) for v in _two(e, b.add(x, b.mul(step, I64(128)))))
        e.store(upper_halves(e, first, second), b.add(out, b.mul(step, I64(STEP_BYTES))))


scaled_bf16: Final = kernel(_emit_scaled)
"""out = x * factor. Arguments: x, out (a row of a block), count, bits of the factor."""


def _emit_divided(e: Emitter, x: Value, out: Value, count: Value, divisor_at: Value) -> None:
    b = e.b
    factor = e.splat(b.fdiv(F32(1.0), e.load(divisor_at, F32, align=4)))
    with e.loop(b.sdiv(count, I64(STEP_K))) as step:
        first, second = (b.fmul(v, factor) for v in _two(e, b.add(x, b.mul(step, I64(128)))))
        e.store(upper_halves(e, first, second), b.add(out, b.mul(step, I64(STEP_BYTES))))


divided_bf16: Final = kernel(_emit_divided)
"""out = x / the float32 at an address. Arguments: x, out (a row of a block), count, address."""


def _reciprocal(e: Emitter, a: Value) -> Value:
    """1 / a to 2**-14, twice as exact as bfloat16 needs; a division would cost most of the kernel."""
    everywhere = ir.Constant(I16, -1)
    zeros = e.const(0.0)
    return e.call("llvm.x86.avx512.rcp14.ps.512", e.f32, a, zeros, everywhere)


def _emit_silu(e: Emitter, source: Value, out: Value, rows: Value) -> None:
    b = e.b
    with e.loop(rows) as row:
        gate, up = _two(e, b.add(source, b.mul(row, I64(128))))
        # Above 2**126 the quotient is zero in bfloat16's eyes anyway; `exp2` ends at 127.
        power = b.fmul(gate, e.const(-_LOG2_E))
        high = e.const(126.0)
        power = b.select(b.fcmp_ordered(">", power, high), high, power)
        denominator = b.fadd(e.const(1.0), exp2(e, power))
        product = b.fmul(b.fmul(gate, _reciprocal(e, denominator)), up)
        bits = b.lshr(b.add(b.bitcast(product, e.i32), e.iconst(0x8000)), e.iconst(16))
        e.store(b.trunc(bits, e.vector_of(I16)), b.add(out, b.mul(row, I64(64))))


silu_mul_bf16: Final = kernel(_emit_silu)
"""Rows of LANES gates and their ups -> half a step of a block of rows. Arguments: source, out, rows."""


def _emit_softmax(e: Emitter, scores: Value, scores_step: Value, weights: Value, rows: Value,
                  seen: Value, columns: Value, state: Value, mix: Value, dim: Value) -> None:  # fmt: skip
    b = e.b
    vectors = b.sdiv(columns, I64(LANES))
    lane_ids = e.b.sext(e.lane_numbers(), e.i64)
    with e.loop(rows) as row:
        source = b.add(scores, b.mul(row, scores_step))
        limit = b.add(seen, row)
        limit = b.select(b.icmp_signed("<", limit, columns), limit, columns)
        limit = b.select(b.icmp_signed("<", limit, I64(0)), I64(0), limit)
        whole = b.mul(b.sdiv(limit, I64(STEP_K)), I64(2))

        def masked(index: Value, source: Value = source, limit: Value = limit) -> Value:
            value = e.load_f32(b.add(source, b.mul(index, I64(64))))
            position = b.add(e.splat(b.mul(index, I64(LANES))), lane_ids)
            is_seen = b.icmp_signed("<", position, e.splat(limit))
            return b.select(is_seen, value, e.const(float("-inf")))

        highest = e.variable(e.const(float("-inf")))
        with e.loop(whole) as index:
            value = e.load_f32(b.add(source, b.mul(index, I64(64))))
            b.store(e.maximum(value, b.load(highest)), highest)
        with e.loop(b.sub(vectors, whole)) as rest:
            b.store(e.maximum(masked(b.add(whole, rest)), b.load(highest)), highest)
        place = b.add(state, b.mul(row, I64(8)))
        old = e.load(place, F32, align=4)
        top = e.reduce(b.load(highest), e.scalar_maximum)
        top = b.select(b.fcmp_ordered(">", top, old), top, old)
        base = e.splat(top)
        factor = exp2(e, e.splat(b.fsub(old, top)))
        totals = [e.variable(e.const(0.0)) for _ in range(2)]
        target = b.add(weights, b.mul(row, I64(64)))

        def store(step: Value, first: Value, second: Value, totals: list[Value] = totals,
                  base: Value = base, target: Value = target) -> None:  # fmt: skip
            # The sum is of the rounded weights: they must add up to one, or a common part of the
            # values (large in models with attention sinks) comes through wrong.
            found = [rounded(e, exp2(e, b.fsub(value, base))) for value in (first, second)]
            for value, total in zip(found, totals, strict=True):
                b.store(b.fadd(value, b.load(total)), total)
            bits = upper_halves(e, *found)
            e.store(bits, b.add(target, b.mul(step, I64(STEP_BYTES))))

        whole_steps = b.sdiv(whole, I64(2))
        with e.loop(whole_steps) as step:
            store(step, *_two(e, b.add(source, b.mul(step, I64(128)))))
        with e.loop(b.sub(b.sdiv(vectors, I64(2)), whole_steps)) as rest:
            step = b.add(whole_steps, rest)
            first = b.mul(step, I64(2))
            store(step, masked(first), masked(b.add(first, I64(1))))
        total = e.sum(b.fadd(b.load(totals[0]), b.load(totals[1])))
        scalar = b.extract_element(factor, I32(0))
        e.store(top, place, align=4)
        summed = b.fadd(b.fmul(e.load(place, F32, 4, align=4), scalar), total)
        e.store(summed, place, 4, align=4)
        with b.if_then(b.fcmp_unordered("!=", top, old)):
            mixed = b.add(mix, b.mul(b.mul(row, dim), I64(4)))
            with e.loop(b.sdiv(dim, I64(LANES))) as index:
                at = b.add(mixed, b.mul(index, I64(64)))
                e.store(b.fmul(e.load_f32(at), factor), at)


softmax_bf16: Final = kernel(_emit_softmax)
"""A step of an online softmax over some columns (Milakov and Gimelshein, 2018), scores in log2 units.

Row r sees the first `seen + r` columns. Writes weights as a block of rows; updates [row](maximum, sum)
of float32 at `state` (start: -inf, 0), and scales the rows of `mix` when a maximum changes.

Arguments: scores, bytes between rows, weights, rows, seen, columns (a multiple of 32), state, mix
(float32 [row][dim]), dim.
"""
