"""A fused linear map of few rows in Triton: the weights stream by once, and little else happens.

One row: multiply and add in registers, a program's whole weight tile in flight at once. Two to
sixteen rows: tensor cores, rows padded to 16. The norm is folded in: rms_norm(x) @ w is
(x * norm_weight) @ w, times 1 / rms of the row, which is summed up along the way.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.skinny_linear import MAX_ROWS, Activation
from finback.kernels.triton_launch import has_dependent_launch


@triton.jit
def _weights(start, ins, step, size_in, BLOCK_IN: tl.constexpr, EVEN: tl.constexpr):
    """The tile [outputs, BLOCK_IN] of one step."""
    at = step * BLOCK_IN + ins
    if EVEN:
        return tl.load(start + at[None, :], eviction_policy="evict_first")
    return tl.load(start + at[None, :], mask=(at < size_in)[None, :], other=0.0)


@triton.jit
def _inputs(
    x_ptr, norm, ins, step, size_in, DTYPE: tl.constexpr, BLOCK_IN: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """x of one step times the norm's weight, rounded like the weights; and its squares."""
    at = step * BLOCK_IN + ins
    inside = at < size_in
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    squares = x * x
    if HAS_NORM:
        x *= norm
    return x.to(DTYPE).to(tl.float32), squares


@triton.jit
def _one_row(
    x_ptr, norm_ptr, w_ptr, residual_ptr, out_ptr, size_out, size_in, eps,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, NUM_STEPS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUT outputs a program; size_in is cut into NUM_STEPS pieces of BLOCK_IN.

    Weights do not depend on the kernel before: the first three tiles are under way while it ends.
    """
    if PDL:
        tl_cuda.gdc_launch_dependents()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = outs < size_out
    ins = tl.arange(0, BLOCK_IN)
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    rows = w_ptr + tl.where(is_out, outs, 0).to(tl.int64)[:, None] * size_in
    ups = rows + size_out.to(tl.int64) * size_in
    w0 = _weights(rows, ins, 0, size_in, BLOCK_IN, EVEN)
    u0 = _weights(ups, ins, 0, size_in, BLOCK_IN, EVEN) if GATED else w0
    if NUM_STEPS > 1:
        w1 = _weights(rows, ins, 1, size_in, BLOCK_IN, EVEN)
        u1 = _weights(ups, ins, 1, size_in, BLOCK_IN, EVEN) if GATED else w1
    if NUM_STEPS > 2:
        w2 = _weights(rows, ins, 2, size_in, BLOCK_IN, EVEN)
        u2 = _weights(ups, ins, 2, size_in, BLOCK_IN, EVEN) if GATED else w2
    norm = tl.zeros([BLOCK_IN], dtype=tl.float32)
    if HAS_NORM:
        norm = tl.load(norm_ptr + ins, mask=ins < size_in, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_wait()
    total = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    up_total = tl.zeros([BLOCK_OUT, BLOCK_IN], dtype=tl.float32)
    squares = tl.zeros([BLOCK_IN], dtype=tl.float32)
    for step in tl.static_range(NUM_STEPS):
        if HAS_NORM and step > 0:
            at = step * BLOCK_IN + ins
            norm = tl.load(norm_ptr + at, mask=at < size_in, other=0.0).to(tl.float32)
        x, square = _inputs(x_ptr, norm, ins, step, size_in, dtype, BLOCK_IN, HAS_NORM)
        squares += square
        if step == 0:
            w, up = w0, u0
        elif step == 1:
            w, up = w1, u1
        elif step == 2:
            w, up = w2, u2
        else:
            w = _weights(rows, ins, step, size_in, BLOCK_IN, EVEN)
            up = _weights(ups, ins, step, size_in, BLOCK_IN, EVEN) if GATED else w
        total += w.to(tl.float32) * x[None, :]
        if GATED:
            up_total += up.to(tl.float32) * x[None, :]
    y = tl.sum(total, axis=1)
    scale = 1.0
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / size_in + eps)
        y *= scale
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * (tl.sum(up_total, axis=1) * scale)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + outs, mask=is_out, other=0.0).to(tl.float32)
    tl.store(out_ptr + outs, y.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _few_rows(
    x_ptr, norm_ptr, w_ptr, residual_ptr, out_ptr, num_rows, size_out, size_in, eps,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows and BLOCK_OUT outputs a program; a loop over size_in on tensor cores."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    is_out = outs < size_out
    rows = tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    columns = tl.where(is_out, outs, 0).to(tl.int64)[None, :] * size_in
    ups = columns + size_out.to(tl.int64) * size_in
    total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    up_total = tl.zeros([BLOCK_ROWS, BLOCK_OUT], dtype=tl.float32)
    squares = tl.zeros([BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, size_in, BLOCK_IN):
        at = start + tl.arange(0, BLOCK_IN)
        inside = at < size_in
        x = tl.load(
            x_ptr + rows[:, None] * size_in + at[None, :],
            mask=is_row[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        if HAS_NORM:
            squares += tl.sum(x * x, axis=1)
            x *= tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = x.to(w_ptr.dtype.element_ty)
        if EVEN:
            w = tl.load(w_ptr + columns + at[:, None], eviction_policy="evict_first")
        else:
            w = tl.load(w_ptr + columns + at[:, None], mask=inside[:, None], other=0.0)
        total = tl.dot(x, w, total)
        if GATED:
            if EVEN:
                up = tl.load(w_ptr + ups + at[:, None], eviction_policy="evict_first")
            else:
                up = tl.load(w_ptr + ups + at[:, None], mask=inside[:, None], other=0.0)
            up_total = tl.dot(x, up, up_total)
    if HAS_NORM:
        scale = (1.0 / tl.sqrt(squares / size_in + eps))[:, None]
        total *= scale
        up_total *= scale
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up_total
    where = rows[:, None] * size_out + outs[None, :]
    is_inside = is_row[:, None] & is_out[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + where, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, total.to(out_ptr.dtype.element_ty), mask=is_inside)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: Activation = "none",
) -> torch.Tensor:
    """See the package's docstring. All tensors are contiguous. Returns `out`."""
    num_rows, size_in = x.shape
    gated = activation == "silu_mul"
    size_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if num_rows > MAX_ROWS or weight.shape[1] != size_in or out.shape != (num_rows, size_out):
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)}, out {list(out.shape)}")
    pdl = has_dependent_launch(x.device)
    flags = {
        "HAS_NORM": norm_weight is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    norm = x if norm_weight is None else norm_weight
    added = out if residual is None else residual
    if num_rows == 1:
        block_out, block_in, warps = one_row_tile(size_out, size_in, gated)
        _one_row[(triton.cdiv(size_out, block_out),)](
            x, norm, weight, added, out, size_out, size_in, eps,
            BLOCK_OUT=block_out, BLOCK_IN=block_in, NUM_STEPS=triton.cdiv(size_in, block_in),
            EVEN=size_in % block_in == 0, num_warps=warps, **flags,
        )  # fmt: skip
        return out
    block_out, block_in = few_rows_tile(size_out, size_in)
    _few_rows[(triton.cdiv(size_out, block_out),)](
        x, norm, weight, added, out, num_rows, size_out, size_in, eps,
        BLOCK_ROWS=MAX_ROWS, BLOCK_OUT=block_out, BLOCK_IN=block_in,
        EVEN=size_in % block_in == 0, num_warps=4, num_stages=4, **flags,
    )  # fmt: skip
    return out


def one_row_tile(size_out: int, size_in: int, gated: bool) -> tuple[int, int, int]:
    """(outputs, inputs, warps) of a program, as measured on an H200 (benchmarks/cuda_kernels.py)."""
    whole = triton.next_power_of_2(size_in)
    is_wide = size_in >= 4096
    if size_out > 32_768:
        return (8, 2048, 8) if is_wide else (32, min(512, whole), 8)
    if gated:
        return (2, 2048, 4) if is_wide else (4, min(1024, whole), 2)
    if size_in > 2048:
        return (4, 2048, 8 if size_in > 4096 else 4) if is_wide else (8, 2048, 4)
    if size_in > 1024:
        return 8, 1024, 8
    return 4, whole, 4


def few_rows_tile(size_out: int, size_in: int) -> tuple[int, int]:
    """(outputs, inputs) of a program: enough programs to fill the device."""
    block_in = 64 if size_in % 128 else 128
    if size_out > 32768:
        return 128, block_in
    return (16 if size_out <= 4096 else 32), block_in
