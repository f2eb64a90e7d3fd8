"""Counter-based noise: a hash of (seed, position, token id), the same on every backend."""

from typing import Final

import torch

_MASK: Final = 0xFFFFFFFF
_WEYL: Final = 0x9E3779B9
_SPLIT: Final = 0x9E3779B97F4A7C15


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a row, by two rounds of splitmix64 (Steele et al. 2014)."""
    state = _splitmix((seed ^ _splitmix(position)) & 0xFFFFFFFFFFFFFFFF)
    return state & _MASK, state >> 32


def _splitmix(value: int) -> int:
    value = (value + _SPLIT) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of each token id, float32 of the same shape.

    -log(E) with E = -log(1 - v) exponential, v = (hash + 0.5) / 2^32: large values of the noise come
    from small v, where float32 is exact, so the tail is right down to 2^-33.
    """
    first, second = row_keys(seed, position)
    value = _mix((token_ids.long() * _WEYL + first) & _MASK)
    value = _mix(value ^ second)
    uniform = ((value.double() + 0.5) * 2.0**-32).float().clamp_(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _mix(value: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser with low bias (C. Wellons' lowbias32), in int64 arithmetic."""
    value = value ^ (value >> 16)
    value = (value * 0x7FEB352D) & _MASK
    value = value ^ (value >> 15)
    value = (value * 0x846CA68B) & _MASK
    return value ^ (value >> 16)
