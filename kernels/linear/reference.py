"""A linear map in plain torch."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [rows, in] times weight [out, in] transposed, in weight's dtype; float32 out."""
    out = torch.nn.functional.linear(x.to(weight.dtype), weight).float()
    return out if bias is None else out + bias.float()
