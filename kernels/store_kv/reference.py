"""Writing new keys and values into their blocks."""

import torch


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_blocks: torch.Tensor,
    v_blocks: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """k, v: [rows, kv_heads, head_dim]; blocks: [num_blocks, block_size, kv_heads, head_dim] views."""
    block_size = k_blocks.shape[1]
    slots = slot_mapping.long()
    blocks, offsets = slots // block_size, slots % block_size
    k_blocks[blocks, offsets] = k.to(k_blocks.dtype)
    v_blocks[blocks, offsets] = v.to(v_blocks.dtype)
