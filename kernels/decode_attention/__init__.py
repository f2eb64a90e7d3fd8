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
from typing import Final

import torch

SHORT_CONTEXT: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """`num_programs` a kv head; `tile` tokens at a time, at least `min_tokens` a program.

    `is_whole`: a program takes a sequence, and not a share of all.
    """

    num_programs: int
    tile: int = 64
    num_warps: int = 4
    num_stages: int = 1
    min_tokens: int = 64
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWorkspace:
    """Room for contexts that several programs share.

    `partial` [programs, 2, heads, head_dim + 2] float32: a program's share begins inside of one
    sequence and ends inside of another at most. `arrived` [S, kv_heads] int32, zero between calls.
    """

    partial: torch.Tensor
    arrived: torch.Tensor
    shape: LaunchShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Which sequences begin with the same blocks: those are read once for all of them.

    `start_blocks` [S] int32: leading blocks that a sequence shares, 0 = none; less than its context.
    `chunks` [C, 1 + members] int32: (shared blocks, sequences, -1 where there are fewer), 0 blocks =
    no chunk. `parts` [S, heads, parts, head_dim + 2] float32: room for what was attended to.
    It changes no result but by rounding.
    """

    start_blocks: torch.Tensor
    chunks: torch.Tensor
    parts: torch.Tensor


SHARED_PARTS: Final = 16
_DOT_ROWS: Final = 16


def num_members(num_heads: int, num_kv_heads: int) -> int:
    """Sequences of a chunk: as many as fill the rows of a product of tiles; under 2 = no use."""
    return _DOT_ROWS // (num_heads // num_kv_heads)


def new_shared(
    num_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: str | torch.device
) -> SharedPrefixes:
    """Nothing shared yet, and room for it."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    parts = (num_seqs, num_heads, SHARED_PARTS, head_dim + 2)
    return SharedPrefixes(
        start_blocks=zeros(num_seqs),
        chunks=zeros(max(1, num_seqs // 2), 1 + num_members(num_heads, num_kv_heads)),
        parts=torch.zeros(parts, dtype=torch.float32, device=device),
    )


def new_workspace(
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    shape: LaunchShape,
    device: str | torch.device,
) -> DecodeWorkspace:
    """A workspace for up to `num_seqs` sequences."""
    partial = (shape.num_programs, 2, num_heads, head_dim + 2)
    return DecodeWorkspace(
        partial=torch.zeros(partial, dtype=torch.float32, device=device),
        arrived=torch.zeros((num_seqs, num_kv_heads), dtype=torch.int32, device=device),
        shape=shape,
    )
