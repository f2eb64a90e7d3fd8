"""The experts of a mixture over 4-bit weights in plain torch: unpacked as a whole, then multiplied."""

from typing import Final, NamedTuple

import torch

from finback.kernels.expert_mlp.reference import expert_mlp

GROUP: Final = 32
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Fp4Matrices(NamedTuple):
    """One matrix [out, in] an expert. `codes` uint8 [E, out, in / 2]: e2m1, the even column in the low
    half; `scales` uint8 [E, out, in / 32]: e8m0 of a row's 32 columns, at most 128 (a factor of 2).
    """

    codes: torch.Tensor
    scales: torch.Tensor


def expert_mlp_fp4(
    hidden: torch.Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: float,
) -> torch.Tensor:
    """As `expert_mlp`: hidden [N, d] bfloat16, experts int64 [N, k], -1 is none; float32 [N, d]."""
    dtype = hidden.dtype
    return expert_mlp(
        hidden, unpack(gate_up).to(dtype), unpack(down).to(dtype), experts, weights, limit=limit
    )


def unpack(matrices: Fp4Matrices) -> torch.Tensor:
    """float32 [E, out, in]."""
    codes = torch.stack((matrices.codes & 15, matrices.codes >> 4), dim=-1).flatten(-2).long()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=matrices.codes.device)
    exponents = matrices.scales.to(torch.int32) - 127
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return table[codes] * scales.repeat_interleave(GROUP, dim=-1)
