"""Experts of 4-bit weights over 8-bit activations in plain torch, as DeepSeek's reference rounds.

What goes into a matrix is e4m3 in groups of 128 channels with a power-of-two scale (at least 1e-4 / 448);
the routing weight is part of what the second matrix gets.
"""

from typing import Final, NamedTuple

import torch

from finback.kernels.expert_mlp.reference import clamped_gate
from finback.kernels.expert_mlp_fp4.reference import Fp4Matrices, unpack

ACTIVATION_GROUP: Final = 128
E4M3_MAX: Final = 448.0
LEAST_AMAX: Final = 1e-4


class Rows8(NamedTuple):
    """`codes` float8_e4m3fn [N, C]; `scales` float32 [N, C / 128], powers of two."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantise_rows(rows: torch.Tensor) -> Rows8:
    """Of rows [N, C], C a multiple of 128."""
    groups = rows.float().view(*rows.shape[:-1], -1, ACTIVATION_GROUP)
    amax = groups.abs().amax(dim=-1).clamp(min=LEAST_AMAX)
    scales = torch.exp2(torch.ceil(torch.log2(amax / E4M3_MAX)))
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    return Rows8(codes.flatten(-2), scales)


def dequantise_rows(rows: Rows8) -> torch.Tensor:
    """float32 [N, C]."""
    return rows.codes.float() * rows.scales.repeat_interleave(ACTIVATION_GROUP, dim=-1)


def expert_mlp_w4a8(
    hidden: torch.Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: float,
) -> torch.Tensor:
    """As `expert_mlp`: hidden [N, d], experts int64 [N, k], -1 is none; float32 [N, d]."""
    rows8 = dequantise_rows(quantise_rows(hidden))
    total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in sorted(set(experts[experts >= 0].tolist())):
        rows, slots = (experts == expert).nonzero(as_tuple=True)
        first, second = (_one(matrices, expert) for matrices in (gate_up, down))
        inner = clamped_gate(rows8[rows] @ first.t(), limit) * weights[rows, slots, None].float()
        total.index_add_(0, rows, dequantise_rows(quantise_rows(inner)) @ second.t())
    return total


def _one(matrices: Fp4Matrices, expert: int) -> torch.Tensor:
    part = slice(expert, expert + 1)
    return unpack(Fp4Matrices(matrices.codes[part], matrices.scales[part]))[0]
