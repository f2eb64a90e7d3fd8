"""Packing a source's tensors for the CPU's matrix tiles."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from finback.kernels.decoder_stack.layout import Layer
from finback.kernels.linear import cpu_packing
from finback.kernels.linear.cpu_packing import PackedMatrix
from finback.kernels.linear.cpu_tiles import GROUP
from finback.kernels.simd import LANES
from finback.shared.models.config import ModelConfig
from finback.shared.models.weight_names import EMBEDDING, FINAL_NORM, HEAD, layer_name
from finback.shared.models.weights import QuantisedTensor, WeightReader

LayerWeights = dict[int, PackedMatrix | torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWeights:
    """All weights. `layers`: by column of `Layer`. A tied head is the embedding itself."""

    embedding: PackedMatrix
    head: PackedMatrix
    final_norm: torch.Tensor
    layers: list[LayerWeights]

    @property
    def num_bytes(self) -> int:
        """Memory of the packed matrices."""
        matrices = [self.embedding, *([] if self.head is self.embedding else [self.head])]
        for layer in self.layers:
            matrices += [item for item in layer.values() if isinstance(item, PackedMatrix)]
        return sum(matrix.num_bytes for matrix in matrices)


def load_cpu_weights(config: ModelConfig, reader: WeightReader) -> CpuWeights:
    """Read and pack everything."""
    embedding = pack(reader, EMBEDDING)
    return CpuWeights(
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else pack(reader, HEAD),
        final_norm=reader.tensor(FINAL_NORM, torch.float32),
        layers=[_layer(config, reader, index) for index in range(config.num_layers)],
    )


def _layer(config: ModelConfig, reader: WeightReader, index: int) -> LayerWeights:
    def name(part: str) -> str:
        return layer_name(index, part)

    found: LayerWeights = {
        Layer.ATTN_NORM: reader.tensor(name("attn_norm"), torch.float32),
        Layer.QKV: cpu_packing.join([pack(reader, name(part)) for part in ("q", "k", "v")]),
        Layer.O: pack(reader, name("o")),
        Layer.MLP_NORM: reader.tensor(name("mlp_norm"), torch.float32),
        Layer.GATE_UP: _gate_up(config, reader, name("gate"), name("up")),
        Layer.DOWN: pack(reader, name("down")),
    }
    if config.qk_norm:
        found[Layer.Q_NORM] = reader.tensor(name("q_norm"), torch.float32)
        found[Layer.K_NORM] = reader.tensor(name("k_norm"), torch.float32)
    return found


_4_BIT: Final = ("Q4_0", "Q4_1", "Q4_K")


def pack(reader: WeightReader, name: str) -> PackedMatrix:
    """One matrix in the nearest packed kind: 4-bit and Q8_0 as they are, others as float16."""
    quantised = reader.quantised(name)
    if quantised is not None and _is_packable(quantised):
        return _pack_blocks(quantised)
    return _pack_tensor(_plain(reader, name))


def _gate_up(config: ModelConfig, reader: WeightReader, gate: str, up: str) -> PackedMatrix:
    """Gate and up, LANES columns of each in turn, so that one tile holds both."""
    size = config.intermediate_size
    order = np.arange(2 * size).reshape(2, -1, LANES).swapaxes(0, 1).reshape(-1)
    first, second = reader.quantised(gate), reader.quantised(up)
    if (
        first is not None
        and second is not None
        and first.type_name == second.type_name
        and _is_packable(first)
    ):
        both = np.concatenate((first.data, second.data))[order]
        shape = (2 * size, config.hidden_size)
        return _pack_blocks(QuantisedTensor(type_name=first.type_name, shape=shape, data=both))
    tensors = [_plain(reader, gate), _plain(reader, up)]
    if tensors[0].dtype != tensors[1].dtype:
        tensors = [tensor.float() for tensor in tensors]
    return _pack_tensor(torch.cat(tensors)[torch.from_numpy(order)])


def _is_packable(tensor: QuantisedTensor) -> bool:
    return tensor.type_name in (*_4_BIT, "Q8_0") and tensor.shape[1] % GROUP == 0


def _plain(reader: WeightReader, name: str) -> torch.Tensor:
    """Unquantised as stored; other quantised types as float16 (finer than any of them)."""
    if reader.quantised(name) is not None:
        return reader.tensor(name, torch.float16)
    return reader.stored(name)


def _pack_tensor(tensor: torch.Tensor) -> PackedMatrix:
    if tensor.dtype == torch.bfloat16:
        return cpu_packing.pack_plain(cpu_packing.BF16, tensor.view(torch.int16).numpy())
    if tensor.dtype == torch.float16:
        return cpu_packing.pack_plain(cpu_packing.F16, tensor.view(torch.int16).numpy())
    return cpu_packing.pack_plain(cpu_packing.F32, tensor.float().numpy())


def _pack_blocks(tensor: QuantisedTensor) -> PackedMatrix:
    if tensor.type_name == "Q8_0":
        blocks = tensor.data.reshape(tensor.shape[0], -1, 34)
        return cpu_packing.pack_q8(blocks[..., 2:], _halves(blocks[..., :2])[..., 0])
    if tensor.type_name == "Q4_1":
        blocks = tensor.data.reshape(tensor.shape[0], -1, 20)
        scales = _halves(blocks[..., :4])
        return cpu_packing.pack_q4(blocks[..., 4:], scales[..., 0], scales[..., 1])
    if tensor.type_name == "Q4_0":
        blocks = tensor.data.reshape(tensor.shape[0], -1, 18)
        scale = _halves(blocks[..., :2])[..., 0]
        # w = (q - 8) * scale; a power of two, so exact.
        return cpu_packing.pack_q4(blocks[..., 2:], scale, (scale * np.float16(-8)))
    return _pack_q4_k(tensor)


def _halves(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(raw).view(np.float16)


def _pack_q4_k(tensor: QuantisedTensor) -> PackedMatrix:
    """Super-blocks of 256: two float16, eight 6-bit scales and minimums, 128 bytes of quants.

    Layout as in ggml's block_q4_K: byte j of the first 8 of `packed` holds the low 6 bits of scale
    or minimum j < 4; the rest lie in the last 4 bytes and the upper bits of the first 8.
    """
    blocks = tensor.data.reshape(tensor.shape[0], -1, 144)
    factors = _halves(blocks[..., :4]).astype(np.float32)
    packed = blocks[..., 4:16]
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=-1)
    minimum = np.concatenate((mid & 63, (high >> 4) | ((mid >> 6) << 4)), axis=-1)
    scales = (factors[..., :1] * scale).astype(np.float16)
    minimums = (-factors[..., 1:] * minimum).astype(np.float16)
    # 32 bytes hold group 2i in their low and group 2i + 1 in their high halves; ours pairs k, k + 16.
    quants = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    groups = np.concatenate((quants & 15, quants >> 4), axis=-2)
    repacked = groups[..., :16] | (groups[..., 16:] << 4)
    return cpu_packing.pack_q4(
        repacked.reshape(tensor.shape[0], -1, 16),
        scales.reshape(tensor.shape[0], -1),
        minimums.reshape(tensor.shape[0], -1),
    )
