"""Passes over a row of logits. For other compiled code.

Results of a pass are left lane by lane in `state`, float32 and int32 vectors one after the other:
best values, their token ids, and a mask that is non-zero in lanes that saw a NaN.
"""

from collections.abc import Callable
from typing import Final

from finback.kernels.simd import I32, I64, LANES, Emitter, Value, kernel

STATE_BYTES: Final = 3 * LANES * 4

_WEYL: Final = 0x9E3779B9
_MIX_FIRST: Final = 0x7FEB352D
_MIX_SECOND: Final = 0x846CA68B


def _start(e: Emitter, state: Value) -> None:
    e.store(e.const(float("-inf")), state)
    e.store(e.iconst(0), state, LANES * 4)
    e.store(e.iconst(0), state, 2 * LANES * 4)


start_search: Final = kernel(_start, "search")
"""Begin a search for the best. Arguments: state."""


def _search(e: Emitter, scores: Value, vectors: Value, first_id: Value, state: Value,
            score: Callable[[Value, Value], Value],
            candidates: Callable[[Value], Value] | None = None) -> None:  # fmt: skip
    """Update the state with `score(raw, token ids)` of every lane; the first of equals stays.

    `candidates(raw)` says which lanes can win: where none can, nothing is computed.
    """
    b = e.b
    best = e.variable(e.load_f32(state))
    ids = e.variable(e.load(state, e.i32, LANES * 4))
    spoiled = e.variable(e.load(state, e.i32, 2 * LANES * 4))
    base = b.add(e.splat(b.trunc(first_id, I32)), e.lane_numbers())

    def update(raw: Value, index: Value) -> None:
        token_ids = b.add(base, e.splat(b.trunc(b.mul(index, I64(LANES)), I32)))
        value = score(raw, token_ids)
        is_better = b.fcmp_ordered(">", value, b.load(best))
        b.store(b.select(is_better, token_ids, b.load(ids)), ids)
        b.store(b.select(is_better, value, b.load(best)), best)

    with e.loop(vectors) as index:
        raw = e.load_f32(b.add(scores, b.mul(index, I64(LANES * 4))))
        is_nan = b.sext(b.fcmp_unordered("uno", raw, raw), e.i32)
        b.store(b.or_(b.load(spoiled), is_nan), spoiled)
        if candidates is None:
            update(raw, index)
        else:
            with b.if_then(e.any_lane(candidates(raw))):
                update(raw, index)
    e.store(b.load(best), state)
    e.store(b.load(ids), state, LANES * 4)
    e.store(b.load(spoiled), state, 2 * LANES * 4)


def _emit_greedy(e: Emitter, scores: Value, vectors: Value, first_id: Value, state: Value) -> None:
    _search(e, scores, vectors, first_id, state, lambda raw, token_ids: raw)


search_greedy: Final = kernel(_emit_greedy)
"""The highest score. Arguments: scores, vectors, id of the first token, state."""


def _mix(e: Emitter, value: Value) -> Value:
    """lowbias32, as in `noise.py`."""
    b = e.b
    value = b.xor(value, b.lshr(value, e.iconst(16)))
    value = b.mul(value, e.iconst(_MIX_FIRST))
    value = b.xor(value, b.lshr(value, e.iconst(15)))
    value = b.mul(value, e.iconst(_MIX_SECOND))
    return b.xor(value, b.lshr(value, e.iconst(16)))


def _gumbel(e: Emitter, token_ids: Value, first_key: Value, second_key: Value) -> Value:
    """The noise of `noise.py`; v = (hash + 0.5) / 2^32 from two exact halves of the hash."""
    b = e.b
    value = _mix(e, b.add(b.mul(token_ids, e.iconst(_WEYL)), first_key))
    value = _mix(e, b.xor(value, second_key))
    high = b.sitofp(b.lshr(value, e.iconst(16)), e.f32)
    low = b.sitofp(b.and_(value, e.iconst(0xFFFF)), e.f32)
    rest = e.fma(low, e.const(2.0**-32), e.const(2.0**-33))
    uniform = e.minimum(e.fma(high, e.const(2.0**-16), rest), e.const(1.0 - 2.0**-24))
    # -log(1 - v): the series where 1 - v would lose v's digits.
    small = b.fmul(
        uniform, e.fma(uniform, e.fma(uniform, e.const(1 / 3), e.const(0.5)), e.const(1.0))
    )
    large = b.fneg(e.log(b.fsub(e.const(1.0), uniform)))
    is_small = b.fcmp_ordered("<", uniform, e.const(2.0**-9))
    return b.fneg(e.log(b.select(is_small, small, large)))


def _emit_noisy(e: Emitter, scores: Value, vectors: Value, first_id: Value, state: Value,
                temperature_bits: Value, limit_bits: Value, keys: Value) -> None:  # fmt: skip
    b = e.b
    temperature = e.splat(e.f32_of_bits(temperature_bits))
    limit = e.splat(e.f32_of_bits(limit_bits))
    first_key = e.splat(b.trunc(keys, I32))
    second_key = e.splat(b.trunc(b.lshr(keys, I64(32)), I32))

    def reaches(raw: Value) -> Value:
        return b.fcmp_ordered(">=", b.fdiv(raw, temperature), limit)

    def score(raw: Value, token_ids: Value) -> Value:
        noisy = b.fadd(b.fdiv(raw, temperature), _gumbel(e, token_ids, first_key, second_key))
        return b.select(reaches(raw), noisy, e.const(float("-inf")))

    _search(e, scores, vectors, first_id, state, score, reaches)


search_noisy: Final = kernel(_emit_noisy)
"""The highest score / temperature + noise among those whose first part reaches a limit.

Arguments: scores, vectors, id of the first token, state, bits of the temperature, bits of the limit,
the row's two keys (the second in the upper half).
"""


def _emit_mass(e: Emitter, scores: Value, vectors: Value, top_bits: Value, temperature_bits: Value,
               least_bits: Value, sum_at: Value) -> None:  # fmt: skip
    b = e.b
    least = e.splat(e.f32_of_bits(least_bits))
    top = e.splat(e.f32_of_bits(top_bits))
    temperature = e.splat(e.f32_of_bits(temperature_bits))
    total = e.variable(e.const(0.0))
    with e.loop(vectors) as index:
        raw = e.load_f32(b.add(scores, b.mul(index, I64(LANES * 4))))
        scaled = b.fdiv(raw, temperature)
        weight = e.exp(b.fsub(scaled, top))
        kept = b.select(b.fcmp_ordered(">=", scaled, least), weight, e.const(0.0))
        b.store(b.fadd(b.load(total), kept), total)
    e.store(e.sum(b.load(total)), sum_at, align=4)


exponential_mass: Final = kernel(_emit_mass)
"""Sum of exp(score / temperature - top) over scores / temperature >= least.

Arguments: scores, vectors, bits of top, bits of the temperature, bits of least, address of the sum.
"""
