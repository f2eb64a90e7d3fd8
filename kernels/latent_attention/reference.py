"""Attention of many heads over one latent row a token, from chosen rows only; plain torch."""

import torch


def latent_attention(
    queries: torch.Tensor,
    window: torch.Tensor,
    window_rows: torch.Tensor,
    entries: torch.Tensor,
    entry_rows: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax(q k / scale) k over the union of a query's window rows and its compressed entries.

    queries [N, H, D]; window [M, D] and entries [E, D] are key and value at once. window_rows [N, W]
    and entry_rows [N, K] int32: rows of the two tables, -1 is none. sinks [H] float32: a logit
    without a value, not scaled. Returns [N, H, D] in the queries' dtype; computed in float32.
    """
    keys = torch.cat((_gather(window, window_rows), _gather(entries, entry_rows)), dim=1)
    rows = torch.cat((window_rows, entry_rows), dim=1)
    scores = torch.einsum("nhd,nkd->nhk", queries.float(), keys) * scale
    scores = scores.masked_fill((rows < 0)[:, None, :], -torch.inf)
    sink = sinks.float()[None, :, None].expand(scores.shape[0], -1, 1)
    weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
    return torch.einsum("nhk,nkd->nhd", weights, keys).to(queries.dtype)


def _gather(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[N, K, D] float32; rows that are none give zeros, for what is in the table may be no number."""
    if rows.shape[1] == 0 or table.shape[0] == 0:
        return table.new_zeros((*rows.shape, table.shape[1]), dtype=torch.float32)
    found = table[rows.clamp(min=0).long()].float()
    return found.masked_fill((rows < 0)[..., None], 0.0)
