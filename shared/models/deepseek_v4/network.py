"""The V4 network in plain torch: the truth that faster implementations are checked against."""

from collections.abc import Callable
from typing import Final

import torch

from finback.kernels.hyper_mix.reference import Mix, hyper_collapse, hyper_mix, hyper_spread
from finback.kernels.rms_norm.reference import rms_norm
from finback.shared.models.deepseek_v4.attention import Attention
from finback.shared.models.deepseek_v4.batch import V4Batch
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.expert_exchange import ExpertExchange, LocalExchange
from finback.shared.models.deepseek_v4.memory import LayerMemory, V4Memory
from finback.shared.models.deepseek_v4.mixture import Mixture
from finback.shared.models.deepseek_v4.rope import Rotation
from finback.shared.models.deepseek_v4.weights import HyperWeights, LayerWeights, V4Weights

# Rows of a head in another type that are converted at a time: bounds the memory, 128 MiB at 4,096 wide.
_HEAD_ROWS: Final = 8192


class Layer:
    """Two sites: attention and experts, each between a mix of the streams and their spreading."""

    def __init__(
        self,
        config: V4Config,
        ratio: int,
        weights: LayerWeights | Callable[[], LayerWeights],
        rotation: Rotation,
        exchange: ExpertExchange,
    ) -> None:
        self._config = config
        self._ratio = ratio
        self._weights = weights
        self._rotation = rotation
        self._exchange = exchange

    def __call__(self, batch: V4Batch, streams: torch.Tensor, memory: LayerMemory) -> torch.Tensor:
        """streams [N, n, d] -> the same."""
        config = self._config
        # Weights that are kept as stored are dequantised here, and let go behind the layer.
        weights = self._weights if isinstance(self._weights, LayerWeights) else self._weights()
        attention = Attention(config, self._ratio, weights.attention, self._rotation)
        mixture = Mixture(config, weights.mixture, self._exchange)
        mix = self._mixed(streams, weights.attention_mix, weights.attention_norm)
        streams = hyper_spread(streams, attention(batch, mix.hidden, memory), mix)
        mix = self._mixed(streams, weights.mixture_mix, weights.mixture_norm)
        return hyper_spread(streams, mixture(batch.token_ids, mix.hidden), mix)

    def _mixed(self, streams: torch.Tensor, weights: HyperWeights, norm: torch.Tensor) -> Mix:
        config = self._config
        return hyper_mix(
            streams,
            weights.fn,
            weights.base,
            weights.scale,
            norm_eps=config.norm_eps,
            eps=config.hyper_eps,
            num_iterations=config.sinkhorn_iterations,
            norm_weight=norm,
        )


class V4Network:
    """All layers and the head."""

    def __init__(
        self,
        config: V4Config,
        weights: V4Weights,
        device: str = "cpu",
        exchange: ExpertExchange | None = None,
    ) -> None:
        """`exchange`: how rows reach experts of other ranks; None: all experts are in `weights`."""
        self.config = config
        exchange = exchange or LocalExchange()
        self._weights = weights
        rotations = {ratio: Rotation(config, ratio, device) for ratio in set(config.ratios)}
        self._layers = tuple(
            Layer(config, ratio, layer, rotations[ratio], exchange)
            for ratio, layer in zip(config.ratios, weights.layers, strict=True)
        )

    def forward(self, batch: V4Batch, memory: V4Memory | tuple[LayerMemory, ...]) -> torch.Tensor:
        """Run the layers, write block KV and state; normed hidden states of `logit_rows` [R, d]."""
        config, weights = self.config, self._weights
        embedded = weights.embedding[batch.token_ids]
        embedded = embedded if weights.dtype is None else embedded.to(weights.dtype)
        streams = embedded[:, None, :].expand(-1, config.num_streams, -1)
        layers = memory.layers if isinstance(memory, V4Memory) else memory
        for layer, own in zip(self._layers, layers, strict=True):
            streams = layer(batch, streams, own)
        collapsed = hyper_collapse(
            streams[batch.logit_rows],
            weights.head_mix.fn,
            weights.head_mix.base,
            weights.head_mix.scale,
            norm_eps=config.norm_eps,
            eps=config.hyper_eps,
        )
        return rms_norm(collapsed, weights.norm, config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size]."""
        head = self._weights.head
        if head.dtype == hidden.dtype:
            return (hidden @ head.t()).float()
        starts = range(0, head.shape[0], _HEAD_ROWS)
        parts = (head[at : at + _HEAD_ROWS].to(hidden.dtype) for at in starts)
        return torch.cat([hidden @ part.t() for part in parts], dim=1).float()
