"""Causal attention over paged KV in plain torch: gather, multiply, mask, soften, multiply."""

import torch


def paged_attention(
    q: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """q: [rows, heads, head_dim]; blocks: [num_blocks, block_size, kv_heads, head_dim] views.

    The rows of a sequence are the last ones of its context; each sees itself and all before it.
    Returns float32 [rows, heads, head_dim].
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    starts = cu_seqlens.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        k = _gather(k_blocks, block_tables[index], context_len)
        v = _gather(v_blocks, block_tables[index], context_len)
        out[rows] = _attend(q[rows].float(), k, v, scale)
    return out


def _gather(blocks: torch.Tensor, table: torch.Tensor, context_len: int) -> torch.Tensor:
    """[context_len, kv_heads, head_dim] float32 of one sequence."""
    block_size = blocks.shape[1]
    used = table[: -(-context_len // block_size)].long()
    return blocks[used].flatten(0, 1)[:context_len].float()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    num_rows, num_heads, _ = q.shape
    context_len, num_kv_heads, _ = k.shape
    k = k.repeat_interleave(num_heads // num_kv_heads, dim=1)
    v = v.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    last_seen = torch.arange(context_len - num_rows, context_len, device=q.device)
    hidden = torch.arange(context_len, device=q.device)[None, :] > last_seen[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
