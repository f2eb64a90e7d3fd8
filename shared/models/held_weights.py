"""How many bytes weights take once they are loaded, told from the headers alone. Torch-free."""

import math
from collections.abc import Mapping
from typing import Final

from finback.shared.models.config import ModelConfig
from finback.shared.models.deepseek_v4.inventory import Inventory

_WIDTHS: Final = {"f32": 4, "bf16": 2, "f16": 2}
# Packed kinds of the compiled network: (bytes, weights) of a group; others are held as float16.
_PACKED: Final = {"Q4_0": (20, 32), "Q4_1": (20, 32), "Q4_K": (20, 32), "Q8_0": (34, 32)}
_PLAIN: Final = {"F32": 4, "F16": 2, "BF16": 2}

Tensor = tuple[str, tuple[int, ...]]


def v4_held_bytes(inventory: Inventory) -> dict[str, int]:
    """By `weights_dtype`: `f32` (what `auto` is) and `bf16` dequantised, `stored` as in the file.

    Mixes, biases and sinks stay float32 in all of them; they are too small to be told apart.
    """
    weights, tables = inventory.num_elements()
    return {
        "f32": _WIDTHS["f32"] * weights + 8 * tables,
        "bf16": _WIDTHS["bf16"] * weights + 8 * tables,
        "stored": sum(inventory.formats().values()),
    }


def dense_held_bytes(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`auto` on the CPU: packed where the compiled network takes the model, else float32; and plain.

    `tensors`: stored type and shape by name.
    """
    num_weights = sum(math.prod(shape) for _, shape in tensors.values())
    plain = {name: width * num_weights for name, width in _WIDTHS.items()}
    has_bias = config.attention_bias or config.output_bias or config.mlp_bias
    if config.window_layers or has_bias:
        return {"auto": plain["f32"], **plain}
    return {"auto": sum(map(_packed_bytes, tensors.values())), **plain}


def _packed_bytes(tensor: Tensor) -> int:
    kind, shape = tensor
    count = math.prod(shape)
    if len(shape) < 2:
        return 4 * count
    if kind in _PACKED:
        num_bytes, group = _PACKED[kind]
        return count // group * num_bytes
    return _PLAIN.get(kind, 2) * count
