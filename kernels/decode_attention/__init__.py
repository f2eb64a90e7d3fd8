"""Op `decode_attention`: all between the qkv projection and the output projection, one row a sequence.

For every sequence s with context_lens[s] > 0, at position p = context_lens[s] - 1:

    q, k, v = heads of qkv[s]                       qkv: [S, (heads + 2 * kv_heads) * head_dim]
    if q_norm is not None: q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)   over each head
    q, k = rotary(q, p), rotary(k, p)
    k, v are stored at slot p of the sequence's blocks
    out[s] = softmax(scale * q @ K.T) @ V           K, V: the sequence's p + 1 tokens

Sequences with context_lens 0 are padding: nothing is read or written for them.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkspace:
    """Room for a context's parts: `partial` [S, heads, splits, head_dim + 2] float32, `arrived`
    [S, kv_heads] int32, zero between calls. `num_splits`: most programs that share a context, of which
    none takes fewer than `min_tokens` tokens (but the last)."""

    partial: torch.Tensor
    arrived: torch.Tensor
    num_splits: int
    min_tokens: int = 64


def new_workspace(
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_splits: int,
    device: str | torch.device,
    min_tokens: int = 64,
) -> DecodeWorkspace:
    """A workspace for up to `num_seqs` sequences."""
    rows = num_seqs if num_splits > 1 else 1
    return DecodeWorkspace(
        partial=torch.zeros(
            (rows, num_heads, num_splits, head_dim + 2), dtype=torch.float32, device=device
        ),
        arrived=torch.zeros((rows, num_kv_heads), dtype=torch.int32, device=device),
        num_splits=num_splits,
        min_tokens=min_tokens,
    )
