"""A V4 layer's weights as the NVIDIA kernels want them: projections of one input merged, experts packed."""

from dataclasses import dataclass

import torch

from finback.kernels.expert_mlp_fp4.reference import Fp4Matrices
from finback.kernels.expert_mlp_w4a8.packing import PackedMatrices, pack
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.weights import (
    CompressorWeights,
    HyperWeights,
    LayerWeights,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCompressor:
    """`columns` of the merged projection: contents, then gates."""

    columns: slice
    position_bias: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayerWeights:
    """`project` [P, d]: q_a, latent and what the compressors take, in this order; output_a
    [groups, in, rank]. `indexer` only writes its keys here: contexts stay below its selection.
    """

    attention_mix: HyperWeights
    attention_norm: torch.Tensor
    project: torch.Tensor
    query_norm: torch.Tensor
    query_b: torch.Tensor
    latent_norm: torch.Tensor
    sinks: torch.Tensor
    output_a: torch.Tensor
    output_b: torch.Tensor
    compressor: PackedCompressor | None
    indexer: PackedCompressor | None
    mixture_mix: HyperWeights
    mixture_norm: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None
    gate_up: PackedMatrices
    down: PackedMatrices
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor


def cuda_layer(
    config: V4Config, weights: LayerWeights, gate_up: Fp4Matrices, down: Fp4Matrices
) -> CudaLayerWeights:
    """Merge and pack one layer. Its routed experts are `gate_up` and `down`, not those in `weights`."""
    attention, mixture = weights.attention, weights.mixture
    parts = [attention.query_a, attention.latent]
    compressor = _appended(parts, attention.compressor)
    indexer = _appended(parts, attention.indexer.compressor if attention.indexer else None)
    first = attention.output_a.view(config.num_output_groups, config.output_rank, -1)
    return CudaLayerWeights(
        attention_mix=weights.attention_mix,
        attention_norm=weights.attention_norm,
        project=torch.cat(parts).contiguous(),
        query_norm=attention.query_norm,
        query_b=attention.query_b,
        latent_norm=attention.latent_norm,
        sinks=attention.sinks,
        output_a=first.transpose(1, 2).contiguous(),
        output_b=attention.output_b,
        compressor=compressor,
        indexer=indexer,
        mixture_mix=weights.mixture_mix,
        mixture_norm=weights.mixture_norm,
        gate=mixture.gate,
        bias=mixture.bias,
        table=mixture.table,
        shared_gate_up=mixture.shared_gate_up,
        shared_down=mixture.shared_down,
        gate_up=pack(gate_up),
        down=pack(down),
    )


def _appended(
    parts: list[torch.Tensor], weights: CompressorWeights | None
) -> PackedCompressor | None:
    """Add a compressor's projections to the merged one."""
    if weights is None:
        return None
    first = sum(part.shape[0] for part in parts)
    parts += [weights.content, weights.gate]
    return PackedCompressor(
        columns=slice(first, first + 2 * weights.content.shape[0]),
        position_bias=weights.position_bias,
        norm=weights.norm,
    )
