"""Rotation of one head. For other compiled code."""

from typing import Final

from finback.kernels.simd import I64, LANES, Emitter, Value, kernel


def _emit(e: Emitter, x: Value, cos: Value, sin: Value, half: Value) -> None:
    b = e.b
    half_bytes = b.mul(half, I64(4))
    with e.loop(b.sdiv(half, I64(LANES))) as index:
        at = b.mul(index, I64(LANES * 4))
        first_at, second_at = b.add(x, at), b.add(b.add(x, half_bytes), at)
        first, second = e.load_f32(first_at), e.load_f32(second_at)
        c, s = e.load_f32(b.add(cos, at)), e.load_f32(b.add(sin, at))
        e.store(e.fma(first, c, b.fneg(b.fmul(second, s))), first_at)
        e.store(e.fma(second, c, b.fmul(first, s)), second_at)


rotary: Final = kernel(_emit)
"""Rotate in place. Arguments: x, cos, sin (float32), head_dim / 2 (a multiple of LANES)."""
