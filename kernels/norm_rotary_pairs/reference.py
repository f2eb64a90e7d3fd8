"""RMS norm of each head and rotation of its last channels, in plain torch."""

import torch

from finback.kernels.rms_norm.reference import rms_norm
from finback.kernels.rotary_pairs.reference import rotary_pairs


def norm_rotary_pairs(
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float | None = None,
    weight: torch.Tensor | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """rows [N, H, D]: divided by each head's root mean square if `eps` is given, times `weight` [D] if
    given; then pair i of the last 2r channels turned by the token's angle i (cos, sin [N, r] float32).
    """
    if eps is not None:
        size = rows.shape[-1]
        ones = torch.ones(size, device=rows.device) if weight is None else weight
        rows = rms_norm(rows, ones, eps)
    return rotary_pairs(rows, cos, sin, inverse=inverse)
