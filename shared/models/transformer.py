"""The network in separate ops, over whatever kernels were selected: plain and on any device."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from finback.kernels.dispatch import KernelSet
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.rope import RotaryTable, inverse_frequencies
from finback.shared.models.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
    layer_name,
)
from finback.shared.models.weights import WeightReader

_INITIAL_POSITIONS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A weight [out, in] and perhaps a bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's tensors; q, k, v and gate, up are merged along their outputs."""

    attn_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Transformer:
    """A `CausalLM` that calls one kernel an op. Activations are float32 between ops."""

    waits_for_layers: ClassVar[bool] = True

    def __init__(
        self,
        config: ModelConfig,
        reader: WeightReader,
        kernels: KernelSet,
        *,
        device: str,
        mode: str,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.device = device
        self.mode = mode
        self.kernels = kernels
        self.default_kv_dtype = "f32" if mode == "reference" or device == "cpu" else "bf16"
        self.numerics = f"torch-{mode}-{str(dtype).removeprefix('torch.')}"
        self._dtype = dtype
        self._load(reader)

    def _load(self, reader: WeightReader) -> None:
        def vector(name: str) -> torch.Tensor:
            return reader.tensor(name, torch.float32).to(self.device)

        self._embedding = reader.tensor(EMBEDDING, self._dtype).to(self.device)
        tied = self.config.tie_word_embeddings
        self._head = self._embedding if tied else reader.tensor(HEAD, self._dtype).to(self.device)
        self._final_norm = vector(FINAL_NORM)
        self._layers = [self._layer(reader, index) for index in range(self.config.num_layers)]
        frequencies = inverse_frequencies(self.config, reader.optional(ROPE_FACTORS, torch.float32))
        self._rope = RotaryTable(
            frequencies, self.device, min(self.config.max_model_len, _INITIAL_POSITIONS)
        )
        tensors = [self._embedding, *([] if tied else [self._head])]
        for layer in self._layers:
            tensors += [item.weight for item in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self.weights_bytes = sum(tensor.nbytes for tensor in tensors)

    def _layer(self, reader: WeightReader, index: int) -> Layer:
        def merged(*parts: str) -> Linear:
            names = [layer_name(index, part) for part in parts]
            weights = [reader.tensor(name, self._dtype) for name in names]
            biases = [reader.optional(f"{name}.bias", torch.float32) for name in names]
            kept = [bias for bias in biases if bias is not None]
            bias = torch.cat(kept).to(self.device) if len(kept) == len(names) else None
            return Linear(weight=torch.cat(weights).to(self.device), bias=bias)

        def vector(part: str) -> torch.Tensor:
            return reader.tensor(layer_name(index, part), torch.float32).to(self.device)

        return Layer(
            attn_norm=vector("attn_norm"),
            qkv=merged("q", "k", "v"),
            q_norm=vector("q_norm") if self.config.qk_norm else None,
            k_norm=vector("k_norm") if self.config.qk_norm else None,
            o=merged("o"),
            mlp_norm=vector("mlp_norm"),
            gate_up=merged("gate", "up"),
            down=merged("down"),
        )

    def new_pool(self, num_blocks: int, block_size: int, kv_dtype: str = "auto") -> KVPool:
        """See `CausalLM`."""
        return KVPool(
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=self.config.num_kv_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            kv_dtype=self.default_kv_dtype if kv_dtype == "auto" else kv_dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """See `CausalLM`."""
        self._rope.grow(batch.max_context)
        positions = batch.positions.long()
        cos, sin = self._rope.cos[positions], self._rope.sin[positions]
        kernels, eps = self.kernels, self.config.rms_norm_eps
        x = kernels.embedding(batch.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            if batch.gate is not None:
                batch.gate.wait(index + 1)
            normed = kernels.rms_norm(x, layer.attn_norm, eps)
            x = x + self._attention(normed, layer, batch, kv, index, cos, sin)
            normed = kernels.rms_norm(x, layer.mlp_norm, eps)
            gate_up = kernels.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
            x = x + kernels.linear(kernels.silu_mul(gate_up), layer.down.weight, layer.down.bias)
        found: torch.Tensor = kernels.rms_norm(x[batch.logit_rows], self._final_norm, eps)
        return found

    def _attention(
        self,
        x: torch.Tensor,
        layer: Layer,
        batch: ForwardBatch,
        kv: KVPool,
        index: int,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, hidden_size] normed -> the attention block's contribution, [T, hidden_size]."""
        config, kernels = self.config, self.kernels
        qkv = kernels.linear(x, layer.qkv.weight, layer.qkv.bias)
        q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        q = q.reshape(-1, config.num_heads, config.head_dim)
        k = k.reshape(-1, config.num_kv_heads, config.head_dim)
        v = v.reshape(-1, config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q, k = kernels.rotary(q, cos, sin), kernels.rotary(k, cos, sin)
        mixed = self._mix(q, k, v, batch, kv, index)
        found: torch.Tensor = kernels.linear(mixed.flatten(1), layer.o.weight, layer.o.bias)
        return found

    def _mix(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        kv: KVPool,
        index: int,
    ) -> torch.Tensor:
        """Keep k, v [T, kv_heads, head_dim] of layer `index`; what q [T, heads, head_dim] sees."""
        k_blocks, v_blocks = kv.token_major(index)
        self.kernels.store_kv(k, v, k_blocks, v_blocks, batch.slot_mapping)
        found: torch.Tensor = self.kernels.paged_attention(
            q,
            k_blocks,
            v_blocks,
            batch.block_tables,
            batch.cu_seqlens,
            batch.context_lens,
            self.config.head_dim**-0.5,
        )
        return found

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        found: torch.Tensor = self.kernels.linear(hidden, self._head, None)
        return found

    def close(self) -> None:
        """Nothing to release before the object goes."""
