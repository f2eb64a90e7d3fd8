"""A fused linear map of few rows in plain torch."""

import torch

from finback.kernels.linear.reference import linear
from finback.kernels.rms_norm.reference import rms_norm
from finback.kernels.silu_mul.reference import silu_mul
from finback.kernels.skinny_linear import Activation


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
) -> torch.Tensor:
    """See the package's docstring. Returns `out`."""
    wide = x.float() if norm_weight is None else rms_norm(x.float(), norm_weight, eps)
    found = linear(wide, weight, None)
    if activation == "silu_mul":
        found = silu_mul(found)
    if residual is not None:
        found = residual.float() + found
    return out.copy_(found)
