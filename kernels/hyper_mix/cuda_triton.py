"""Hyper-connections in Triton: three kernels a site instead of a hundred small ones.

Streams are read twice: once for the projection, which is cut over their length so that few rows fill
the device, and once for the weighted sum, which finds them in the cache. The Sinkhorn iterations of
a row's 4 x 4 matrix stay in registers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

from typing import Any, Final

import torch
import triton
import triton.language as tl

from finback.kernels.hyper_mix.reference import Mix
from finback.kernels.triton_launch import num_multiprocessors

_BLOCK_IN: Final = 128
_PADDED: Final = 32  # 24 outputs for four streams, and the sum of squares
_MAX_PARTS: Final = 64


@triton.jit
def _project(
    streams_ptr, fn_ptr, parts_ptr, num_rows, size_in, num_outs, share,
    BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One share of z [rows, outs], and in the last column of the squares' sum.

    Streams are bfloat16, so three bfloat16 parts of a float32 weight give all of its digits.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    part = tl.program_id(1)
    outs = tl.arange(0, PADDED)
    is_row, is_out = rows < num_rows, outs < num_outs
    kind: tl.constexpr = streams_ptr.dtype.element_ty
    total = tl.zeros([BLOCK_ROWS, PADDED], dtype=tl.float32)
    squares = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, size_in), BLOCK_IN):
        at = start + tl.arange(0, BLOCK_IN)
        inside = at < size_in
        u = tl.load(
            streams_ptr + rows.to(tl.int64)[:, None] * size_in + at[None, :],
            mask=is_row[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        w = tl.load(
            fn_ptr + outs[None, :] * size_in + at[:, None],
            mask=is_out[None, :] & inside[:, None], other=0.0,
        )  # fmt: skip
        for _ in tl.static_range(3):
            rounded = w.to(kind)
            total = tl.dot(u, rounded, total, input_precision="ieee")
            w -= rounded.to(tl.float32)
        wide = u.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
    total = tl.where(outs[None, :] == PADDED - 1, squares[:, None], total)
    place = (part * num_rows + rows).to(tl.int64)
    tl.store(parts_ptr + place[:, None] * PADDED + outs[None, :], total, mask=is_row[:, None])


@triton.jit
def _mix(
    streams_ptr, parts_ptr, base_ptr, scale_ptr, norm_ptr, hidden_ptr, post_ptr, comb_ptr,
    num_rows, num_parts, size, norm_eps, eps,
    N: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One row: the weights from its sums, then the weighted sum of its streams, normed."""
    row = tl.program_id(0).to(tl.int64)
    outs, parts = tl.arange(0, PADDED), tl.arange(0, PARTS)
    z = tl.load(
        parts_ptr + (parts * num_rows + row)[:, None] * PADDED + outs[None, :],
        mask=(parts < num_parts)[:, None], other=0.0,
    )  # fmt: skip
    z = tl.sum(z, axis=0)
    square = tl.sum(tl.where(outs == PADDED - 1, z, 0.0), axis=0)
    z *= 1.0 / tl.sqrt(square / (N * size) + norm_eps)
    streams = tl.arange(0, N)
    at = outs[None, :]
    pre = tl.sum(tl.where(at == streams[:, None], z[None, :], 0.0), axis=1)
    pre = tl.sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + streams)) + eps
    post = tl.sum(tl.where(at == N + streams[:, None], z[None, :], 0.0), axis=1)
    post = 2.0 * tl.sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + streams))
    tl.store(post_ptr + row * N + streams, post)
    pairs = streams[:, None] * N + streams[None, :]
    is_pair = outs[None, None, :] == 2 * N + pairs[:, :, None]
    comb = tl.sum(tl.where(is_pair, z[None, None, :], 0.0), axis=2)
    comb = comb * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + pairs)
    comb = tl.exp(comb - tl.max(comb, axis=1)[:, None])
    comb = comb / tl.sum(comb, axis=1)[:, None] + eps
    comb = comb / (tl.sum(comb, axis=0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        comb = comb / (tl.sum(comb, axis=1) + eps)[:, None]
        comb = comb / (tl.sum(comb, axis=0) + eps)[None, :]
    tl.store(comb_ptr + row * N * N + pairs, comb)
    dims = tl.arange(0, BLOCK)
    inside = dims < size
    hidden = tl.zeros([BLOCK], dtype=tl.float32)
    for stream in tl.static_range(N):
        own = tl.load(streams_ptr + (row * N + stream) * size + dims, mask=inside, other=0.0)
        hidden += own.to(tl.float32) * tl.sum(tl.where(streams == stream, pre, 0.0), axis=0)
    kind = hidden_ptr.dtype.element_ty
    if HAS_NORM:
        hidden = hidden.to(kind).to(tl.float32)  # as the reference rounds
        hidden *= 1.0 / tl.sqrt(tl.sum(hidden * hidden, axis=0) / size + norm_eps)
        hidden *= tl.load(norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + row * size + dims, hidden.to(kind), mask=inside)


@triton.jit
def _spread(
    streams_ptr, output_ptr, post_ptr, comb_ptr, out_ptr, size,
    N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row, BLOCK channels of all its streams."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = dims < size
    streams = tl.arange(0, N)
    output = tl.load(output_ptr + row * size + dims, mask=inside, other=0.0).to(tl.float32)
    post = tl.load(post_ptr + row * N + streams)
    total = post[:, None] * output[None, :]
    for source in tl.static_range(N):
        own = tl.load(
            streams_ptr + (row * N + source) * size + dims, mask=inside, other=0.0
        ).to(tl.float32)  # fmt: skip
        comb = tl.load(comb_ptr + row * N * N + source * N + streams)
        total += comb[:, None] * own[None, :]
    places = (row * N + streams)[:, None] * size + dims[None, :]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside[None, :])


def hyper_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    eps: float,
    num_iterations: int,
    norm_weight: torch.Tensor | None = None,
) -> Mix:
    """See reference.py. Streams are contiguous; n is 4."""
    num_rows, n, size = streams.shape
    if n != 4:
        raise ValueError(f"the kernel mixes 4 streams, not {n}")
    kind: Any = {"dtype": torch.float32, "device": streams.device}
    hidden = torch.empty((num_rows, size), dtype=streams.dtype, device=streams.device)
    post, comb = torch.empty((num_rows, n), **kind), torch.empty((num_rows, n, n), **kind)
    if num_rows == 0:
        return Mix(hidden, post, comb)
    size_in, block_rows = n * size, 16 if num_rows <= 1024 else 64
    num_tiles = triton.cdiv(num_rows, block_rows)
    wanted = triton.cdiv(2 * num_multiprocessors(streams.device), num_tiles)
    num_parts = max(1, min(wanted, _MAX_PARTS, size_in // _BLOCK_IN))
    share = triton.cdiv(triton.cdiv(size_in, num_parts), _BLOCK_IN) * _BLOCK_IN
    num_parts = triton.cdiv(size_in, share)
    parts = torch.empty((num_parts, num_rows, _PADDED), **kind)
    _project[(num_tiles, num_parts)](
        streams, fn, parts, num_rows, size_in, fn.shape[0], share,
        BLOCK_ROWS=block_rows, BLOCK_IN=_BLOCK_IN, PADDED=_PADDED, num_warps=4,
    )  # fmt: skip
    _mix[(num_rows,)](
        streams, parts, base, scale, fn if norm_weight is None else norm_weight, hidden, post,
        comb, num_rows, num_parts, size, norm_eps, eps,
        N=n, ITERATIONS=num_iterations, BLOCK=triton.next_power_of_2(size), PADDED=_PADDED,
        PARTS=triton.next_power_of_2(num_parts), HAS_NORM=norm_weight is not None, num_warps=8,
    )  # fmt: skip
    return Mix(hidden, post, comb)


def hyper_spread(streams: torch.Tensor, output: torch.Tensor, mix: Mix) -> torch.Tensor:
    """See reference.py."""
    num_rows, n, size = streams.shape
    out = torch.empty_like(streams)
    if num_rows:
        block = min(1024, triton.next_power_of_2(size))
        _spread[(num_rows, triton.cdiv(size, block))](
            streams, output, mix.post, mix.comb, out, size, N=n, BLOCK=block, num_warps=4
        )
    return out
