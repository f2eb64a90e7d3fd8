"""Rotation tables: plain for window-only layers, YaRN for everything in a compressed layer."""

import math
from typing import NamedTuple

import torch

from finback.shared.models.deepseek_v4.config import V4Config, Yarn


class Angles(NamedTuple):
    """cos and sin of the tokens of a step, float32 [N, rope_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotation:
    """The frequencies of one kind of layer. Angles are made when asked for: no table to outgrow."""

    def __init__(self, config: V4Config, ratio: int, device: str) -> None:
        base = config.compress_rope_theta if ratio else config.rope_theta
        yarn = config.yarn if ratio else None
        self._frequencies = frequencies(config.rope_dim, base, yarn).to(device)

    def at(self, positions: torch.Tensor) -> Angles:
        """The angles of absolute positions [N]; float64 products, for float32 loses 1M positions."""
        angles = positions.double()[:, None] * self._frequencies
        return Angles(angles.cos().float(), angles.sin().float())


def frequencies(rope_dim: int, base: float, yarn: Yarn | None) -> torch.Tensor:
    """float64 [rope_dim / 2]: base^(-2i/dim); YaRN (arXiv 2309.00071) slows the long waves down."""
    index = torch.arange(rope_dim // 2, dtype=torch.float64)
    plain = base ** (-2.0 * index / rope_dim)
    if yarn is None:
        return plain
    low = max(math.floor(_turning_dim(yarn.beta_fast, rope_dim, base, yarn)), 0)
    high = min(math.ceil(_turning_dim(yarn.beta_slow, rope_dim, base, yarn)), rope_dim - 1)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0.0, 1.0)
    return plain * (1.0 - ramp) + plain / yarn.factor * ramp


def _turning_dim(num_turns: float, rope_dim: int, base: float, yarn: Yarn) -> float:
    """The index of the frequency that turns `num_turns` times over the original context."""
    turns = yarn.original_max_len / (num_turns * 2.0 * math.pi)
    return rope_dim * math.log(turns) / (2.0 * math.log(base))
