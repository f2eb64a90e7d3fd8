"""Causal attention within a sliding window, in plain torch: gather, multiply, mask, soften, multiply."""

import torch


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    floors: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    """q: [rows, heads, head_dim]; k, v: [rows, kv_heads, head_dim] of this step, not in the ring yet.

    ring: [num_slots, length, k/v, kv_heads, head_dim], position t at t % length; it holds at least the
    `window` - 1 tokens before a sequence's rows. slots, context_lens, floors: [seqs]. The rows of a
    sequence are the last ones of its context. The row of position t sees the positions from
    max(t - window + 1, floor) to t; no row lies before its floor. Returns float32 [rows, heads, head_dim].

    Keys lie in the order of their positions, wherever the ring begins: a row's sum is the same sum.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    starts, lens, first = cu_seqlens.tolist(), context_lens.tolist(), floors.tolist()
    for index, slot in enumerate(slots.tolist()):
        rows = slice(starts[index], starts[index + 1])
        start = lens[index] - (rows.stop - rows.start)
        low = max(start - window + 1, first[index], 0)
        places = torch.arange(low, start, device=q.device) % ring.shape[1]
        kept = ring[slot, places]
        keys = torch.cat((kept[:, 0], k[rows].to(ring.dtype))).float()
        values = torch.cat((kept[:, 1], v[rows].to(ring.dtype))).float()
        positions = torch.arange(low, lens[index], device=q.device)
        out[rows] = _attend(q[rows].float(), keys, values, positions, window, scale)
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    num_rows, num_heads, _ = q.shape
    k = k.repeat_interleave(num_heads // k.shape[1], dim=1)
    v = v.repeat_interleave(num_heads // v.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    own = positions[-num_rows:, None]
    is_seen = (positions <= own) & (positions > own - window)
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
