"""Norm, rotation and storing in Triton: a program a row, one pass over its qkv."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.triton_launch import has_dependent_launch


@triton.jit
def normed_and_rotated(
    start, norm_ptr, cos, sin, eps, is_head, HEADS_P2: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Both halves [HEADS_P2, HEAD_DIM / 2] float32 of neighbouring heads that begin at `start`."""
    half: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, half)
    where = start + tl.arange(0, HEADS_P2)[:, None] * HEAD_DIM + at[None, :]
    first = tl.load(where, mask=is_head[:, None], other=0.0).to(tl.float32)
    second = tl.load(where + half, mask=is_head[:, None], other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        first *= scale * tl.load(norm_ptr + at).to(tl.float32)[None, :]
        second *= scale * tl.load(norm_ptr + half + at).to(tl.float32)[None, :]
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[
        None, :
    ]


@triton.jit
def _row(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, position_ptr, slot_ptr, q_out_ptr, k_ptr,
    v_ptr, eps, stride_block, stride_token,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS_P2: tl.constexpr,
    KV_HEADS_P2: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    at = tl.arange(0, half)
    position = tl.load(position_ptr + row).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + at)
    sin = tl.load(sin_ptr + position * half + at)
    start = qkv_ptr + row * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)

    heads = tl.arange(0, HEADS_P2)
    is_head = heads < NUM_HEADS
    q1, q2 = normed_and_rotated(
        start, q_norm_ptr, cos, sin, eps, is_head, HEADS_P2, HEAD_DIM, HAS_NORM
    )
    out = q_out_ptr + row * (NUM_HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + at[None, :]
    tl.store(out, q1.to(q_out_ptr.dtype.element_ty), mask=is_head[:, None])
    tl.store(out + half, q2.to(q_out_ptr.dtype.element_ty), mask=is_head[:, None])
    if slot >= 0:
        kv_heads = tl.arange(0, KV_HEADS_P2)
        is_kv = kv_heads < NUM_KV_HEADS
        k_start = start + NUM_HEADS * HEAD_DIM
        k1, k2 = normed_and_rotated(
            k_start, k_norm_ptr, cos, sin, eps, is_kv, KV_HEADS_P2, HEAD_DIM, HAS_NORM
        )
        place = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
        into = place + kv_heads[:, None] * HEAD_DIM + at[None, :]
        tl.store(k_ptr + into, k1.to(k_ptr.dtype.element_ty), mask=is_kv[:, None])
        tl.store(k_ptr + into + half, k2.to(k_ptr.dtype.element_ty), mask=is_kv[:, None])
        dims = tl.arange(0, HEAD_DIM)
        offsets = kv_heads[:, None] * HEAD_DIM + dims[None, :]
        v = tl.load(k_start + NUM_KV_HEADS * HEAD_DIM + offsets, mask=is_kv[:, None], other=0.0)
        tl.store(v_ptr + place + offsets, v.to(v_ptr.dtype.element_ty), mask=is_kv[:, None])


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
    """See the package's docstring; blocks are token-major and contiguous. Returns `q_out`."""
    block_size, num_kv_heads, head_dim = k_blocks.shape[1:]
    num_heads = q_out.shape[1] // head_dim
    pdl = has_dependent_launch(qkv.device)
    _row[(qkv.shape[0],)](
        qkv, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, cos, sin,
        positions, slot_mapping, q_out, k_blocks, v_blocks, eps,
        k_blocks.stride(0), k_blocks.stride(1),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        HEADS_P2=triton.next_power_of_2(num_heads),
        KV_HEADS_P2=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, HAS_NORM=q_norm is not None, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return q_out
