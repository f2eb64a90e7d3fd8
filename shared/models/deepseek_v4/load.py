"""From a checkpoint to the weights of the network."""

from functools import partial

import torch

from finback.shared.models.deepseek_v4.checkpoint import V4Checkpoint
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.memory_shape import has_indexer
from finback.shared.models.deepseek_v4.weights import (
    AttentionWeights,
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    MixtureWeights,
    V4Weights,
)


class WeightLoader:
    """Reads all layers, dequantised to `dtype`; what steers (mixes, biases, sinks) stays float32.

    `experts`: the routed experts of this rank, in the order in which they are held; None: all.
    """

    def __init__(
        self,
        checkpoint: V4Checkpoint,
        config: V4Config,
        dtype: torch.dtype = torch.float32,
        experts: tuple[int, ...] | None = None,
        *,
        keeps_stored: bool = False,
    ) -> None:
        """`keeps_stored`: weights stay in memory as in the file, and are dequantised layer by layer
        and expert by expert when they are used.
        """
        self._checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._experts = tuple(range(config.num_experts)) if experts is None else experts
        self._keeps_stored = keeps_stored
        self._held_bytes = checkpoint.hold(self._experts) if keeps_stored else 0

    def load(self) -> V4Weights:
        """Read everything."""
        if self._keeps_stored:
            return self._stored()
        return V4Weights(
            embedding=self._tensor("embed.weight"),
            layers=tuple(
                self._layer(index, ratio) for index, ratio in enumerate(self._config.ratios)
            ),
            head_mix=self._hyper("hc_head"),
            norm=self._tensor("norm.weight"),
            head=self._tensor("head.weight"),
            dtype=self._dtype,
        )

    def _stored(self) -> V4Weights:
        """Embedding and head in the file's own type, all other weights behind functions."""
        return V4Weights(
            embedding=self._checkpoint.as_stored("embed.weight"),
            layers=tuple(
                partial(self._layer, index, ratio)
                for index, ratio in enumerate(self._config.ratios)
            ),
            head_mix=self._hyper("hc_head"),
            norm=self._tensor("norm.weight"),
            head=self._checkpoint.as_stored("head.weight"),
            dtype=self._dtype,
            held_bytes=self._held_bytes,
        )

    def _layer(self, index: int, ratio: int) -> LayerWeights:
        stem = f"layers.{index}"
        return LayerWeights(
            attention_mix=self._hyper(f"{stem}.hc_attn"),
            attention_norm=self._tensor(f"{stem}.attn_norm.weight"),
            attention=self._attention(f"{stem}.attn", ratio),
            mixture_mix=self._hyper(f"{stem}.hc_ffn"),
            mixture_norm=self._tensor(f"{stem}.ffn_norm.weight"),
            mixture=self._mixture(index),
        )

    def _attention(self, stem: str, ratio: int) -> AttentionWeights:
        compressor = self._compressor(f"{stem}.compressor") if ratio else None
        return AttentionWeights(
            query_a=self._tensor(f"{stem}.wq_a.weight"),
            query_norm=self._tensor(f"{stem}.q_norm.weight"),
            query_b=self._tensor(f"{stem}.wq_b.weight"),
            latent=self._tensor(f"{stem}.wkv.weight"),
            latent_norm=self._tensor(f"{stem}.kv_norm.weight"),
            sinks=self._exact(f"{stem}.attn_sink"),
            output_a=self._tensor(f"{stem}.wo_a.weight"),
            output_b=self._tensor(f"{stem}.wo_b.weight"),
            compressor=compressor,
            indexer=self._indexer(f"{stem}.indexer") if has_indexer(ratio) else None,
        )

    def _indexer(self, stem: str) -> IndexerWeights:
        return IndexerWeights(
            query=self._tensor(f"{stem}.wq_b.weight"),
            head_weights=self._tensor(f"{stem}.weights_proj.weight"),
            compressor=self._compressor(f"{stem}.compressor"),
        )

    def _compressor(self, stem: str) -> CompressorWeights:
        return CompressorWeights(
            content=self._tensor(f"{stem}.wkv.weight"),
            gate=self._tensor(f"{stem}.wgate.weight"),
            position_bias=self._exact(f"{stem}.ape"),
            norm=self._tensor(f"{stem}.norm.weight"),
        )

    def _mixture(self, layer: int) -> MixtureWeights:
        stem = f"layers.{layer}.ffn"
        one_by_one = partial(self._expert, layer) if self._keeps_stored else None
        # What is made when it is used is not made here.
        chosen = () if self._keeps_stored else self._experts
        gate_up, down = self._checkpoint.experts(layer, chosen, self._dtype)
        shared = [self._tensor(f"{stem}.shared_experts.{part}.weight") for part in ("w1", "w3")]
        is_hashed = layer < self._config.num_hash_layers
        return MixtureWeights(
            gate=self._tensor(f"{stem}.gate.weight"),
            expert_gate_up=gate_up,
            expert_down=down,
            shared_gate_up=torch.cat(shared),
            shared_down=self._tensor(f"{stem}.shared_experts.w2.weight"),
            bias=None if is_hashed else self._exact(f"{stem}.gate.bias"),
            table=self._tensor(f"{stem}.gate.tid2eid") if is_hashed else None,
            one_expert=one_by_one,
        )

    def _expert(self, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The expert that is held in a slot, dequantised: [1, 2f, d] and [1, d, f]."""
        return self._checkpoint.experts(layer, (self._experts[slot],), self._dtype)

    def _hyper(self, stem: str) -> HyperWeights:
        return HyperWeights(
            fn=self._exact(f"{stem}_fn"),
            base=self._exact(f"{stem}_base"),
            scale=self._exact(f"{stem}_scale"),
        )

    def _tensor(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name, self._dtype)

    def _exact(self, name: str) -> torch.Tensor:
        return self._checkpoint.tensor(name, torch.float32)
