"""Keys and values of one head into their block. For other compiled code."""

from collections.abc import Callable
from typing import Any, Final

from finback.kernels.simd import I32, I64, LANES, Emitter, Value, kernel

Store = Callable[[Emitter, Value, Value], None]


def _value_row(store: Store, item_bytes: int, name: str) -> Any:
    def emit(e: Emitter, source: Value, target: Value, count: Value) -> None:
        b = e.b
        with e.loop(b.sdiv(count, I64(LANES))) as index:
            value = e.load_f32(b.add(source, b.mul(index, I64(LANES * 4))))
            store(e, value, b.add(target, b.mul(index, I64(LANES * item_bytes))))

    return kernel(emit, name)


def _key_column(convert: Callable[[Emitter, Value], Value], item_bytes: int, name: str) -> Any:
    def emit(e: Emitter, source: Value, target: Value, count: Value, step: Value) -> None:
        b = e.b
        with e.loop(b.sdiv(count, I64(LANES))) as index:
            items = convert(e, e.load_f32(b.add(source, b.mul(index, I64(LANES * 4)))))
            start = b.add(target, b.mul(b.mul(index, I64(LANES)), step))
            for lane in range(LANES):
                place = b.add(start, b.mul(step, I64(lane)))
                e.store(b.extract_element(items, I32(lane)), place, align=item_bytes)

    return kernel(emit, name)


store_value_f32: Final = _value_row(lambda e, value, at: e.store(value, at), 4, "f32")
store_value_f16: Final = _value_row(lambda e, value, at: e.store(e.to_f16(value), at), 2, "f16")
store_value_bf16: Final = _value_row(lambda e, value, at: e.store(e.to_bf16(value), at), 2, "bf16")
"""Arguments: source (float32), target, count (a multiple of LANES)."""

store_key_f32: Final = _key_column(lambda e, value: value, 4, "f32")
store_key_f16: Final = _key_column(Emitter.to_f16, 2, "f16")
store_key_bf16: Final = _key_column(Emitter.to_bf16, 2, "bf16")
"""Arguments: source (float32), target, count, bytes between elements in the target."""
