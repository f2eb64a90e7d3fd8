"""Advancing decoding sequences in plain torch."""

import torch


def advance_decode(
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    num_sampled: torch.Tensor,
    max_sampled: torch.Tensor,
    history: torch.Tensor,
) -> None:
    """See the package's docstring. All [S] tensors but `history`; changed in place."""
    for s in range(sampled.shape[0]):
        if context_lens[s] == 0:
            continue
        if num_sampled[s] < history.shape[1]:
            history[s, num_sampled[s]] = sampled[s]
        token_ids[s] = sampled[s]
        num_sampled[s] += 1
        positions[s] += 1
        context_lens[s] = 0 if num_sampled[s] == max_sampled[s] else context_lens[s] + 1
