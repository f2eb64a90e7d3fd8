"""Fused decode attention in plain torch, from the separate references."""

import torch

from finback.kernels.decode_attention import DecodeWorkspace, SharedPrefixes
from finback.kernels.paged_attention.reference import paged_attention
from finback.kernels.rotary_store_kv.reference import rotary_store_kv


def decode_attention(
    qkv: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    workspace: DecodeWorkspace | None = None,
    shared: SharedPrefixes | None = None,
) -> torch.Tensor:
    """See the package's docstring. Returns `out` [S, heads * head_dim]; what is shared is read anew."""
    live = (context_lens > 0).nonzero().flatten()
    if not len(live):
        return out
    block_size, num_kv_heads, head_dim = k_blocks.shape[1:]
    positions = context_lens[live].long() - 1
    tables = block_tables[live]
    rows = torch.arange(len(live), device=qkv.device)
    slots = tables[rows, positions // block_size].long() * block_size + positions % block_size
    q_size = qkv.shape[1] - 2 * num_kv_heads * head_dim
    q = torch.empty((len(live), q_size), dtype=torch.float32, device=qkv.device)
    rotary_store_kv(
        qkv[live], k_blocks, v_blocks, q_norm=q_norm, k_norm=k_norm, eps=eps, cos=cos, sin=sin,
        positions=positions, slot_mapping=slots, q_out=q,
    )  # fmt: skip
    mixed = paged_attention(
        q.view(len(live), -1, head_dim),
        k_blocks,
        v_blocks,
        tables,
        torch.arange(len(live) + 1),
        context_lens[live],
        scale,
    )
    out[live] = mixed.flatten(1).to(out.dtype)
    return out
