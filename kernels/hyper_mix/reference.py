"""Manifold-constrained hyper-connections in plain torch: several residual streams a token.

Formulas: DeepSeek V4 report (arXiv 2606.19348) and its reference code. All arithmetic is float32.
"""

from typing import NamedTuple

import torch

from finback.kernels.rms_norm.reference import rms_norm


class Mix(NamedTuple):
    """One site's mixing: `hidden` [N, d] goes in; `post` [N, n] and `comb` [N, n, n] bring it back."""

    hidden: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def hyper_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    num_iterations: int,
    norm_weight: torch.Tensor | None = None,
) -> Mix:
    """Collapse streams [N, n, d] for a block, and say how its output is spread over them.

    `norm_weight` [d]: the block's own RMS norm, which is applied to what goes in.

    fn [2n + n*n, n*d], base [2n + n*n], scale [3], float32. With z = fn u / rms(u) of the flattened
    streams u: pre = sigmoid(z_0 scale_0 + base_0) + eps; post = 2 sigmoid(z_1 scale_1 + base_1); comb
    [from, to] is a softmax over `to`, plus eps, then Sinkhorn normalised, columns (over `from`) first
    and last: once the columns, then `num_iterations` - 1 times rows and columns.
    """
    n = streams.shape[1]
    z = _projected(streams, fn, norm_eps)
    pre = torch.sigmoid(z[:, :n] * scale[0] + base[:n]) + eps
    post = 2.0 * torch.sigmoid(z[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = (z[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)
    comb = torch.softmax(comb, dim=2) + eps
    comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        comb = comb / (comb.sum(dim=2, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=1, keepdim=True) + eps)
    hidden = _weighted(streams, pre)
    if norm_weight is not None:
        hidden = rms_norm(hidden, norm_weight, norm_eps)
    return Mix(hidden, post, comb)


def hyper_spread(streams: torch.Tensor, output: torch.Tensor, mix: Mix) -> torch.Tensor:
    """New streams [N, n, d]: X'_to = post_to * output + sum over from of comb[from, to] * X_from."""
    kept = torch.einsum("nft,nfd->ntd", mix.comb, streams.float())
    return (kept + mix.post[:, :, None] * output.float()[:, None, :]).to(streams.dtype)


def hyper_collapse(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
) -> torch.Tensor:
    """The head's own mix of streams [N, n, d] -> [N, d]. fn [n, n*d], base [n], scale [1]."""
    z = _projected(streams, fn, norm_eps)
    return _weighted(streams, torch.sigmoid(z * scale[0] + base) + eps)


def _projected(streams: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> torch.Tensor:
    """fn u / rms(u); the norm's division commutes with the product."""
    u = streams.flatten(1).float()
    return (u @ fn.t()) * torch.rsqrt(u.square().mean(dim=-1, keepdim=True) + norm_eps)


def _weighted(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ns,nsd->nd", weights, streams.float()).to(streams.dtype)
