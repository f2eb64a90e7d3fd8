"""Rotary embedding of adjacent pairs at the end of a head; plain torch."""

import torch


def rotary_pairs(
    rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False
) -> torch.Tensor:
    """Turn the last 2r channels of rows [N, ..., D], pair (2i, 2i + 1) by angle i of its token.

    cos, sin [N, r] float32. `inverse` turns back. The other channels are kept. Computed in float32,
    returned in the dtype of `rows`.
    """
    width = 2 * cos.shape[1]
    shape = (cos.shape[0], *([1] * (rows.ndim - 2)), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    if inverse:
        sin = -sin
    even, odd = rows[..., -width::2].float(), rows[..., -width + 1 :: 2].float()
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((rows[..., :-width], turned.to(rows.dtype)), dim=-1)
