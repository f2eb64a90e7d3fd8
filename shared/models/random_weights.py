"""Weights drawn from a seed, for speed runs and tests of models whose files are not at hand."""

import math
from zlib import crc32

import torch

from finback.shared.models.config import ModelConfig
from finback.shared.models.weight_names import shapes
from finback.shared.models.weights import QuantisedTensor


class RandomWeights:
    """A `WeightReader`: each tensor follows from the seed and its name.

    `bound`: all elements are uniform in (-bound, bound). Without it they are as in a trained network:
    norms near 1, and matrices that keep the size of what they multiply.
    """

    def __init__(
        self, config: ModelConfig, *, seed: int = 0, bound: float | None = None, device: str = "cpu"
    ) -> None:
        self._shapes = shapes(config)
        self._seed = seed
        self._bound = bound
        self._device = device

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `WeightReader`."""
        shape = self._shapes[name]
        generator = torch.Generator(self._device).manual_seed(self._seed + crc32(name.encode()))
        drawn = torch.rand(shape, generator=generator, device=self._device) * 2.0 - 1.0
        if self._bound is not None:
            return (drawn * self._bound).to(dtype)
        if len(shape) == 1:
            return (1.0 + 0.1 * drawn).to(dtype)
        return (drawn * math.sqrt(3.0 / shape[1])).to(dtype)

    def quantised(self, name: str) -> QuantisedTensor | None:
        """None: these are plain tensors."""
        return None

    def stored(self, name: str) -> torch.Tensor:
        """See `WeightReader`: as drawn, float32."""
        return self.tensor(name, torch.float32)

    def optional(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """See `WeightReader`."""
        return self.tensor(name, dtype) if name in self._shapes else None
