"""V4 weights drawn from a seed, for speed runs and tests of devices without a checkpoint at hand."""

import math

import torch

from finback.kernels.expert_mlp_fp4.reference import Fp4Matrices
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.memory_shape import has_indexer, has_overlap
from finback.shared.models.deepseek_v4.weights import (
    AttentionWeights,
    CompressorWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    MixtureWeights,
)


class RandomV4:
    """Draws matrices that keep the size of what they multiply; experts are drawn as fp4 codes."""

    def __init__(
        self, config: V4Config, *, seed: int = 0, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, size_out: int, size_in: int) -> torch.Tensor:
        """[out, in]."""
        return (self._normal(size_out, size_in) / math.sqrt(size_in)).to(self._dtype)

    def norm(self, size: int) -> torch.Tensor:
        """Near 1."""
        return (1.0 + 0.1 * self._normal(size)).to(self._dtype)

    def hyper(self, num_outs: int, num_scales: int) -> HyperWeights:
        """A mixing site."""
        size = self._config.num_streams * self._config.hidden_size
        return HyperWeights(
            fn=self._normal(num_outs, size) / math.sqrt(size),
            base=self._normal(num_outs),
            scale=0.7 + 0.1 * self._normal(num_scales),
        )

    def layer(self, index: int) -> LayerWeights:
        """All of a layer but its routed experts, whose places are empty."""
        config = self._config
        n = config.num_streams
        return LayerWeights(
            attention_mix=self.hyper(2 * n + n * n, 3),
            attention_norm=self.norm(config.hidden_size),
            attention=self._attention(config.ratios[index]),
            mixture_mix=self.hyper(2 * n + n * n, 3),
            mixture_norm=self.norm(config.hidden_size),
            mixture=self._mixture(is_hashed=index < config.num_hash_layers),
        )

    def experts(self) -> tuple[Fp4Matrices, Fp4Matrices]:
        """(gate_up, down) of a layer."""
        config = self._config
        size, hidden = config.expert_size, config.hidden_size
        return self._fp4(2 * size, hidden), self._fp4(hidden, size)

    def _fp4(self, size_out: int, size_in: int) -> Fp4Matrices:
        shape = (self._config.num_experts, size_out)
        # Codes have a root mean square of 2.5.
        middle = 127 + round(math.log2(1.0 / (2.5 * math.sqrt(size_in))))
        return Fp4Matrices(
            self._bytes(0, 256, *shape, size_in // 2),
            self._bytes(middle - 1, middle + 2, *shape, size_in // 32),
        )

    def _attention(self, ratio: int) -> AttentionWeights:
        config = self._config
        width, inner = config.head_dim, config.num_output_groups * config.output_rank
        heads = config.num_heads * width
        return AttentionWeights(
            query_a=self.matrix(config.q_rank, config.hidden_size),
            query_norm=self.norm(config.q_rank),
            query_b=self.matrix(heads, config.q_rank),
            latent=self.matrix(width, config.hidden_size),
            latent_norm=self.norm(width),
            sinks=self._normal(config.num_heads),
            output_a=self.matrix(inner, heads // config.num_output_groups),
            output_b=self.matrix(config.hidden_size, inner),
            compressor=self._compressor(ratio, width) if ratio else None,
            indexer=self._indexer(ratio) if has_indexer(ratio) else None,
        )

    def _indexer(self, ratio: int) -> IndexerWeights:
        config = self._config
        size = config.index_num_heads * config.index_head_dim
        return IndexerWeights(
            query=self.matrix(size, config.q_rank),
            head_weights=self.matrix(config.index_num_heads, config.hidden_size),
            compressor=self._compressor(ratio, config.index_head_dim),
        )

    def _compressor(self, ratio: int, width: int) -> CompressorWeights:
        channels = width * (2 if has_overlap(ratio) else 1)
        return CompressorWeights(
            content=self.matrix(channels, self._config.hidden_size),
            gate=self.matrix(channels, self._config.hidden_size),
            position_bias=0.5 * self._normal(ratio, channels),
            norm=self.norm(width),
        )

    def _mixture(self, *, is_hashed: bool) -> MixtureWeights:
        config = self._config
        hidden, shared = config.hidden_size, config.expert_size * config.num_shared_experts
        none = torch.empty(0, dtype=self._dtype, device=self._device)
        table = None
        if is_hashed:
            order = torch.rand(
                (config.vocab_size, config.num_experts),
                generator=self._generator,
                device=self._device,
            )
            table = order.topk(config.num_experts_per_token).indices
        return MixtureWeights(
            gate=self.matrix(config.num_experts, hidden),
            expert_gate_up=none,
            expert_down=none,
            shared_gate_up=self.matrix(2 * shared, hidden),
            shared_down=self.matrix(hidden, shared),
            bias=None if is_hashed else 0.2 * self._normal(config.num_experts),
            table=table,
        )

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)

    def _bytes(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, generator=self._generator, dtype=torch.uint8, device=self._device
        )
