"""Packed matrices of every kind, with what they stand for."""

from collections.abc import Callable
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt

from finback.kernels.linear import cpu_packing
from finback.kernels.linear.cpu_packing import PackedMatrix
from finback.shared.models import cpu_weights
from finback.shared.models.weights import QuantisedTensor

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A packed matrix and what it stands for, [columns, k]."""

    matrix: PackedMatrix
    weights: Floats


def _blocks(type_name: str, columns: int, num_k: int) -> Case:
    """Random blocks of a GGUF type, dequantised by the gguf package."""
    kind = gguf.GGMLQuantizationType[type_name]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (columns, num_k // elements, num_bytes), dtype=np.uint8)
    # Random bytes make wild scales: write tame ones.
    places = {"Q4_0": [0], "Q8_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2]}[type_name]
    for place in places:
        scales = rng.uniform(-0.02, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    data = blocks.reshape(columns, -1)
    tensor = QuantisedTensor(type_name=type_name, shape=(columns, num_k), data=data)
    return Case(matrix=cpu_weights._pack_blocks(tensor), weights=gguf.quants.dequantize(data, kind))


def _plain(kind: int, columns: int, num_k: int) -> Case:
    values = np.random.default_rng(6).normal(size=(columns, num_k)).astype(np.float32)
    if kind == cpu_packing.F16:
        half = values.astype(np.float16)
        return Case(
            matrix=cpu_packing.pack_plain(kind, half.view(np.int16)),
            weights=half.astype(np.float32),
        )
    if kind == cpu_packing.BF16:
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return Case(
            matrix=cpu_packing.pack_plain(kind, bits),
            weights=(bits.astype(np.uint32) << 16).view(np.float32),
        )
    return Case(matrix=cpu_packing.pack_plain(kind, values), weights=values)


CASES: dict[str, Callable[[int, int], Case]] = {
    "f32": lambda n, k: _plain(cpu_packing.F32, n, k),
    "f16": lambda n, k: _plain(cpu_packing.F16, n, k),
    "bf16": lambda n, k: _plain(cpu_packing.BF16, n, k),
    **{name: lambda n, k, t=name: _blocks(t, n, k) for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K")},  # type: ignore[misc]  # bound now
}
