"""Committing a step in plain torch."""

import torch


def commit_step(
    rows: torch.Tensor,
    sampled: torch.Tensor,
    is_finite: torch.Tensor,
    last_token: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See the package's docstring; `last_token` and `out` are written."""
    is_live = rows[:, 1] > 0
    found = torch.where(is_finite, sampled, torch.full_like(sampled, -1))
    out[is_live] = found[is_live]
    last_token[rows[is_live, 0].long()] = found[is_live].clamp(min=0)
