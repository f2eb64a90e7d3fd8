"""Rotation angles, grown as longer positions appear."""

import math

import torch

from finback.shared.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """[head_dim / 2] float32; `factors` divide them (the tensor rope_freqs of GGUF files)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    return frequencies if factors is None else frequencies / factors.float()


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Linear, or the "llama3" blend between kept and divided frequencies."""
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_len / scaling.low_freq_factor
    high = scaling.original_max_len / scaling.high_freq_factor
    share = (scaling.original_max_len / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    result = torch.where(wavelengths > low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < high, frequencies, result)


class RotaryTable:
    """cos and sin, each [positions, head_dim / 2] float32, computed for at least `num_positions`."""

    def __init__(self, frequencies: torch.Tensor, device: str, initial: int) -> None:
        self._frequencies = frequencies
        self._device = device
        self.cos = self.sin = torch.empty(0)
        self.grow(initial)

    def grow(self, num_positions: int) -> None:
        """Compute more positions if there are too few; doubles, so it seldom happens."""
        if num_positions <= self.cos.shape[0]:
            return
        size = max(num_positions, 2 * self.cos.shape[0])
        # The same float32 product as transformers, so that long positions round alike.
        angles = torch.arange(size).float()[:, None] * self._frequencies[None, :]
        self.cos, self.sin = angles.cos().to(self._device), angles.sin().to(self._device)
