"""A V4 model's tensors by what they are for. Matrices are [out, in]; names as in the digest."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperWeights:
    """One mixing site: fn [24, n * d], base [24], scale [3] (the head's: [n, n * d], [n], [1])."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorWeights:
    """content and gate [channels, d], position_bias [ratio, channels] float32, norm [width]."""

    content: torch.Tensor
    gate: torch.Tensor
    position_bias: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerWeights:
    """query [index heads * index dim, q_rank], head_weights [index heads, d], and its compressor."""

    query: torch.Tensor
    head_weights: torch.Tensor
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWeights:
    """query_b [H * D, q_rank], latent [D, d], output_a [groups * rank, H / groups * D]."""

    query_a: torch.Tensor
    query_norm: torch.Tensor
    query_b: torch.Tensor
    latent: torch.Tensor
    latent_norm: torch.Tensor
    sinks: torch.Tensor
    output_a: torch.Tensor
    output_b: torch.Tensor
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """gate [experts, d]; expert_gate_up [own experts, 2f, d], expert_down [own experts, d, f].

    `bias` [experts] float32 of a score-routed layer; `table` int64 [vocab, k] of a hash-routed one.
    `one_expert`: makes (gate_up, down) of the expert in a slot when it is used; the stacks are empty then.
    """

    gate: torch.Tensor
    expert_gate_up: torch.Tensor
    expert_down: torch.Tensor
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor
    bias: torch.Tensor | None = None
    table: torch.Tensor | None = None
    one_expert: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer."""

    attention_mix: HyperWeights
    attention_norm: torch.Tensor
    attention: AttentionWeights
    mixture_mix: HyperWeights
    mixture_norm: torch.Tensor
    mixture: MixtureWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class V4Weights:
    """The whole model, computed in `dtype` (None: as the embedding is).

    A layer whose weights are kept as stored is a function that dequantises them. `held_bytes`: the
    memory of those.
    """

    embedding: torch.Tensor
    layers: tuple[LayerWeights | Callable[[], LayerWeights], ...]
    head_mix: HyperWeights
    norm: torch.Tensor
    head: torch.Tensor
    dtype: torch.dtype | None = None
    held_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return self.held_bytes or _num_bytes(self)


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(_num_bytes, value))
    if is_dataclass(value):
        return sum(_num_bytes(getattr(value, field.name)) for field in fields(value))
    return 0
