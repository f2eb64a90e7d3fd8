"""How the kernel wants 4-bit weights: made once, when they are loaded; the same number of bytes.

Weights are widened to e4m3, scales included: a row's largest group scale becomes its factor, and what
a group's scale lacks of it (a shift of up to 11 octaves) goes into the exponents. Below that a
group's values are rounded up to 2^-11 of what the row could hold.

Tiles of 128 outputs and 128 inputs lie in one piece each, in the order in which a program reads them:
rows of 64 bytes far apart would cost the memory half of its rate. In each 32-bit word the eight codes keep their order, but the signs change places: those of the first
four codes stand in bits 7, 15, 23 and 31, where the bytes of the first result want them, those of the
other four in bits 3, 11, 19 and 27.
"""

from typing import Final, NamedTuple

import torch

from finback.kernels.expert_mlp_fp4.reference import Fp4Matrices

MAX_SHIFT: Final = 11
TILE: Final = 128
# The exponent of the smallest group: 2^-5, so that 0.5 is e4m3's smallest normal number.
_LEAST_EXPONENT: Final = -5


class PackedMatrices(NamedTuple):
    """`codes` uint8 [E, out / 128, in / 128, 128, 64]; `shifts` uint8 [E, out / 128, in / 128, 128, 4],
    eight times the octaves; `factors` float32 [E, out].
    """

    codes: torch.Tensor
    shifts: torch.Tensor
    factors: torch.Tensor


def pack(matrices: Fp4Matrices) -> PackedMatrices:
    """Of e2m1 codes and e8m0 scales; both sizes are multiples of 128."""
    scales = matrices.scales.to(torch.int32)
    top = scales.amax(dim=-1, keepdim=True)
    shifts = (scales - top + MAX_SHIFT).clamp(min=0)
    exponent = top[..., 0] - 127 - MAX_SHIFT - _LEAST_EXPONENT
    factors = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)
    return PackedMatrices(
        _tiled(_moved_signs(matrices.codes), 64), _tiled((8 * shifts).to(torch.uint8), 4), factors
    )


def _tiled(rows: torch.Tensor, width: int) -> torch.Tensor:
    """[E, out, C] -> [E, out / 128, C / width, 128, width]."""
    num_experts, size_out, size_in = rows.shape
    tiles = rows.view(num_experts, size_out // TILE, TILE, size_in // width, width)
    return tiles.transpose(2, 3).contiguous()


def _moved_signs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., C], C a multiple of 4."""
    four = codes.view(*codes.shape[:-1], -1, 4)
    low, high = (four >> 3) & 1, four >> 7  # signs of codes 0, 2, 4, 6 and of 1, 3, 5, 7
    signs = torch.stack((low, high), dim=-1).flatten(-2)  # of codes 0 to 7
    moved = (four & 0x77) | (signs[..., :4] << 7) | (signs[..., 4:] << 3)
    return moved.flatten(-2)
