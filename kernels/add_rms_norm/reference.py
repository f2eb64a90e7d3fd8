"""Residual addition and norm in plain torch."""

import torch

from finback.kernels.rms_norm.reference import rms_norm


def add_rms_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See the package's docstring. Returns `out`."""
    if added is not None:
        residual += added
    return out.copy_(rms_norm(residual.float(), weight, eps))
