"""The published checkpoints' number formats, dequantised. Formats: OCP microscaling (e8m0 scales).

fp8: e4m3, one power-of-two scale a block of 128 x 128 (any size: it follows from the shapes). fp4: e2m1,
two a byte along the input axis, the even column in the low half; one scale a row and 32 columns.
"""

from typing import Final

import torch

from finback.shared.models.deepseek_v4.inventory import FP4_GROUP

_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """float32 of e8m0 scales: 2^(byte - 127)."""
    exponent = scale.contiguous().view(torch.uint8).to(torch.int32) - 127
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [out, in] from e4m3 [out, in] and e8m0 [ceil(out / block), ceil(in / block)]."""
    rows, columns = weight.shape
    full = scale_values(scale).repeat_interleave(block, 0).repeat_interleave(block, 1)
    return weight.float() * full[:rows, :columns]


def dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] from bytes [out, in / 2] and e8m0 [out, in / 32]."""
    data = packed.contiguous().view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).long()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    return table[codes] * scale_values(scale).repeat_interleave(FP4_GROUP, -1)
