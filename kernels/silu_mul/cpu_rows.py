"""The gated activation of a row. For other compiled code."""

from typing import Final

from finback.kernels.simd import I64, LANES, Emitter, Value, kernel


def _emit(e: Emitter, gate: Value, up: Value, out: Value, count: Value) -> None:
    b = e.b
    with e.loop(b.sdiv(count, I64(LANES))) as index:
        at = b.mul(index, I64(LANES * 4))
        value = e.load_f32(b.add(gate, at))
        # Below -87 the true value is below float32's normal range times the gate: zero.
        sigmoid = b.fdiv(e.const(1.0), b.fadd(e.const(1.0), e.exp(b.fneg(value))))
        product = b.fmul(b.fmul(value, sigmoid), e.load_f32(b.add(up, at)))
        e.store(product, b.add(out, at))


silu_mul: Final = kernel(_emit)
"""out = gate / (1 + exp(-gate)) * up. Arguments: gate, up, out (float32), count (multiple of LANES)."""
