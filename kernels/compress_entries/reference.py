"""Pools the rows of several tokens into one compressed entry; plain torch."""

import torch


def compress_entries(
    contents: torch.Tensor, gates: torch.Tensor, rows: torch.Tensor, *, overlap: bool
) -> torch.Tensor:
    """A softmax over an entry's rows, separately for each channel, of `gates` weighs `contents`.

    contents, gates [M, C] (a gate has its position bias already); rows [E, R] int32 in the order of
    the tokens, -1 is none (only where an entry has no window before it). Without overlap the entry
    has C channels. With overlap it has C / 2, and R is two windows: the rows of the window before
    give their first half ("for the next entry"), the entry's own window the second. Returns [E, C or
    C / 2] float32. Source of the formula: DeepSeek V4 report (arXiv 2606.19348), reference code.
    """
    missing = (rows < 0)[..., None]
    at = rows.clamp(min=0).long()
    values = contents[at].float().masked_fill(missing, 0.0)
    scores = gates[at].float().masked_fill(missing, -torch.inf)
    if overlap:
        values, scores = _halves(values), _halves(scores)
    return (torch.softmax(scores, dim=1) * values).sum(dim=1)


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """[E, R, C] -> [E, R, C / 2]: the first half of the first R / 2 rows, the second of the others."""
    num_before = rows.shape[1] // 2
    width = rows.shape[2] // 2
    return torch.cat((rows[:, :num_before, :width], rows[:, num_before:, width:]), dim=1)
