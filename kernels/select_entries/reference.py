"""The lightning indexer: which compressed entries a query attends to; plain torch."""

import torch


def select_entries(
    queries: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    key_rows: torch.Tensor,
    num_visible: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The `top_k` best of the first `num_visible` entries of each query, as indexes of entries.

    queries [N, H, D], head_weights [N, H], keys [E, D]; key_rows [N, L] int32: where entry i of the
    query's sequence lies in `keys`; num_visible [N]. score = sum over heads of weight * relu(q k).
    Of equal scores the lower index wins. Returns int32 [N, top_k], ascending, then -1 where there
    are fewer. Source of the formula: DeepSeek V4 report (arXiv 2606.19348).
    """
    num_queries, num_entries = key_rows.shape
    chosen = torch.full((num_queries, top_k), -1, dtype=torch.int32, device=queries.device)
    if num_entries == 0:
        return chosen
    scores = entry_scores(queries, head_weights, keys, key_rows)
    index = torch.arange(num_entries, device=queries.device)
    hidden = index[None, :] >= num_visible[:, None]
    order = scores.masked_fill(hidden, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    best = order[:, :top_k]
    best = best.masked_fill(best >= num_visible[:, None], num_entries).sort(dim=1).values
    chosen[:, : best.shape[1]] = best.masked_fill(best == num_entries, -1).to(torch.int32)
    return chosen


def entry_scores(
    queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, key_rows: torch.Tensor
) -> torch.Tensor:
    """float32 [N, L] scores of all entries, also of those that are not visible yet."""
    found = keys[key_rows.clamp(min=0).long()].float()
    products = torch.einsum("nhd,nld->nhl", queries.float(), found).relu()
    return torch.einsum("nh,nhl->nl", head_weights.float(), products)
