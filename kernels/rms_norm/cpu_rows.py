"""RMS norm of a row, with the residual added on the way. For other compiled code."""

from typing import Final

from finback.kernels.simd import F32, I64, LANES, Emitter, Value, kernel


def _emit(e: Emitter, x: Value, delta: Value, weight: Value, out: Value, count: Value,
          eps_bits: Value) -> None:  # fmt: skip
    b = e.b
    vectors = b.sdiv(count, I64(LANES))
    squares = e.variable(e.const(0.0))
    has_delta = b.icmp_signed("!=", delta, I64(0))
    with b.if_then(has_delta), e.loop(vectors) as index:
        at = b.mul(index, I64(LANES * 4))
        target = b.add(x, at)
        e.store(b.fadd(e.load_f32(target), e.load_f32(b.add(delta, at))), target)
    with e.loop(vectors) as index:
        value = e.load_f32(b.add(x, b.mul(index, I64(LANES * 4))))
        b.store(e.fma(value, value, b.load(squares)), squares)
    mean = b.fdiv(e.sum(b.load(squares)), b.sitofp(count, F32))
    root = e.call("llvm.sqrt.f32", F32, b.fadd(mean, e.f32_of_bits(eps_bits)))
    scale = e.splat(b.fdiv(F32(1.0), root))
    with e.loop(vectors) as index:
        at = b.mul(index, I64(LANES * 4))
        scaled = b.fmul(e.load_f32(b.add(x, at)), scale)
        e.store(b.fmul(scaled, e.load_f32(b.add(weight, at))), b.add(out, at))


add_norm: Final = kernel(_emit)
"""x += delta (unless delta is 0); out = x / rms(x) * weight.

Arguments: x, delta, weight, out (float32), count (a multiple of LANES), bits of eps as float32. `out`
may be `x`.
"""
