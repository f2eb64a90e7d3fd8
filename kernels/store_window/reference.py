"""Writing new keys and values into the rings of their sequences."""

import torch


def store_window(
    k: torch.Tensor,
    v: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """k, v: [rows, kv_heads, head_dim]; ring: [num_slots, length, k/v, kv_heads, head_dim], a view.

    Of more rows than the ring is long only the last ones are kept. Read the ring before: a long chunk
    overwrites what its own first rows look at.
    """
    length = ring.shape[1]
    starts, lens = cu_seqlens.tolist(), context_lens.tolist()
    for index, slot in enumerate(slots.tolist()):
        begin, end = starts[index], starts[index + 1]
        begin = max(begin, end - length)
        positions = torch.arange(lens[index] - (end - begin), lens[index], device=k.device)
        ring[slot, positions % length] = torch.stack((k[begin:end], v[begin:end]), 1).to(ring.dtype)
