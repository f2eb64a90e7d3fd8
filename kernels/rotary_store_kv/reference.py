"""Norm, rotation and storing in plain torch, from the separate references."""

import torch

from finback.kernels.rms_norm.reference import rms_norm
from finback.kernels.rotary.reference import rotary
from finback.kernels.store_kv.reference import store_kv


def rotary_store_kv(
    qkv: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    *,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor,
) -> torch.Tensor:
    """See the package's docstring. cos, sin: [positions, head_dim / 2] float32. Returns `q_out`."""
    num_rows = qkv.shape[0]
    num_kv_heads, head_dim = k_blocks.shape[2:]
    kv_size = num_kv_heads * head_dim
    wide = qkv.float()
    parts = (wide[:, : -2 * kv_size], wide[:, -2 * kv_size : -kv_size], wide[:, -kv_size:])
    q, k, v = (part.reshape(num_rows, -1, head_dim) for part in parts)
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    angles = positions.long()
    q, k = rotary(q, cos[angles], sin[angles]), rotary(k, cos[angles], sin[angles])
    kept = slot_mapping >= 0
    store_kv(k[kept], v[kept], k_blocks, v_blocks, slot_mapping[kept])
    return q_out.copy_(q.flatten(1))
