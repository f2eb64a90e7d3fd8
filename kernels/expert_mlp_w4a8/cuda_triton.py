"""Experts of 4-bit weights over 8-bit activations in Triton: fp8 tensor cores, weights unpacked to fp8.

A step takes 128 columns. Four bytes of codes become two registers of four e4m3 each: a byte permute
looks the magnitudes up in a table that already has the group's shift added, and one more operation
sets the signs (`packing.py` says where they stand). So a weight costs about one operation, no product.
The first register holds the first four of eight columns: activations are split alike.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from finback.kernels.expert_mlp_fp4.expert_blocks import added, block_rows, cut_blocks
from finback.kernels.expert_mlp_w4a8.packing import TILE, PackedMatrices
from finback.kernels.triton_launch import is_interpreted

# $2: eight codes; $3: four times the shift. Tables: 0, .5, 1, 1.5 and 2, 3, 4, 6, times 2^-5.
_UNPACK: Final = tl.constexpr(
    """
    {
    .reg .b32 lo, hi, m, s;
    and.b32 lo, $3, 0xFFFFFF00;
    add.u32 lo, lo, 0x14100800;
    add.u32 hi, $3, 0x24201C18;
    and.b32 m, $2, 0x77777777;
    prmt.b32 s, lo, hi, m;
    lop3.b32 $0, $2, 0x80808080, s, 0xEA;
    shr.b32 m, m, 16;
    prmt.b32 s, lo, hi, m;
    shl.b32 m, $2, 4;
    lop3.b32 $1, m, 0x80808080, s, 0xEA;
    }
    """
)


@triton.jit
def _magnitude(code, shift):
    """float32 of three bits, and of eight times a shift."""
    exponent, half = (code >> 1) & 3, (code & 1).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return value * tl.exp2((shift // 8 - 5).to(tl.float32))


@triton.jit
def _to_e4m3(x, PACKED: tl.constexpr, DTYPE: tl.constexpr):
    """Rounded to e4m3, ties to even; in plain arithmetic, since the interpreter loses carries."""
    if PACKED:
        rounded = x.to(tl.float8e4nv)
    else:
        exponent = tl.floor(tl.log2(tl.maximum(tl.abs(x), 1.52587890625e-05)))
        step = tl.exp2(tl.maximum(exponent, -6.0) - 3.0)
        rounded = ((x / step + 12582912.0) - 12582912.0) * step
    return rounded.to(DTYPE)


@triton.jit
def _split(codes, shifts, BLOCK_OUT: tl.constexpr, BYTES: tl.constexpr):
    """What the permutes do, in plain arithmetic: (first four, other four) of eight columns."""
    wide, shift = codes.to(tl.int32), shifts.to(tl.int32)
    low, high = _magnitude(wide & 7, shift), _magnitude((wide >> 4) & 7, shift)
    # Bytes 0 and 1 of a word hold the first four codes, bytes 2 and 3 the others.
    eight = tl.reshape(tl.join(low, high), [BLOCK_OUT, BYTES // 4, 2, 4])
    eight = tl.permute(eight, (0, 1, 3, 2))
    first, other = tl.split(eight)
    first = tl.reshape(first, [BLOCK_OUT, BYTES])
    other = tl.reshape(other, [BLOCK_OUT, BYTES])
    first = tl.where((wide & 128) != 0, -first, first)
    other = tl.where((wide & 8) != 0, -other, other)
    return first, other


@triton.jit
def _tile(
    codes_ptr, shifts_ptr, tile, BLOCK_OUT: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """(first, other) fours of the 128 columns of a tile of weights, [BLOCK_OUT, 64] each."""
    rows = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    codes = tl.load(codes_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :])
    shifts = tl.load(shifts_ptr + rows[:, None] * 4 + tl.arange(0, 4)[None, :])
    shifts = tl.broadcast_to(shifts[:, :, None], [BLOCK_OUT, 4, 16])
    shifts = tl.reshape(shifts, [BLOCK_OUT, 64])
    if PACKED:
        first, other = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,r,r", [codes, shifts], dtype=(tl.float8e4nv, tl.float8e4nv),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        first, other = _split(codes, shifts, BLOCK_OUT, 64)
        first, other = first.to(DTYPE), other.to(DTYPE)
    return first, other


@triton.jit(do_not_specialize=["num_rows", "num_pairs"])
def _gate_up(
    rows_ptr, row_scales_ptr, codes_ptr, shifts_ptr, factors_ptr, weights_ptr, inner_ptr,
    inner_scales_ptr, firsts_ptr, experts_ptr, order_ptr, num_rows, num_pairs, size_in, size,
    limit, num_choices,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """inner [2, pairs, size / 2] (first and other fours) with a scale for each BLOCK_OUT features."""
    block = tl.program_id(1)
    expert, pairs, inside = block_rows(block, firsts_ptr, experts_ptr, order_ptr, BLOCK_ROWS)
    if expert < 0:
        return
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    codes_ptr += expert.to(tl.int64) * (2 * size) * (size_in // 2)
    shifts_ptr += expert.to(tl.int64) * (2 * size) * (size_in // 32)
    factors_ptr += expert * (2 * size)
    rows = pairs // num_choices
    first_ptr = rows_ptr + rows.to(tl.int64)[None, :] * (size_in // 2)
    other_ptr = first_ptr + num_rows.to(tl.int64) * (size_in // 2)
    tile = tl.program_id(0) * (size_in // 128)
    ups = tile + (size // BLOCK_OUT) * (size_in // 128)
    gate = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, size_in // 2, 64):
        at = (start + tl.arange(0, 64))[:, None]
        xa = tl.load(first_ptr + at, mask=inside[None, :], other=0.0)
        xb = tl.load(other_ptr + at, mask=inside[None, :], other=0.0)
        scale = tl.load(
            row_scales_ptr + rows * (size_in // 128) + start // 64, mask=inside, other=0.0
        )  # fmt: skip
        a, b = _tile(codes_ptr, shifts_ptr, tile + start // 64, BLOCK_OUT, PACKED, dtype)
        part = tl.dot(a, xa)
        part = tl.dot(b, xb, part)
        gate += part * scale[None, :]
        a, b = _tile(codes_ptr, shifts_ptr, ups + start // 64, BLOCK_OUT, PACKED, dtype)
        part = tl.dot(a, xa)
        part = tl.dot(b, xb, part)
        up += part * scale[None, :]
    gate = tl.minimum(gate * tl.load(factors_ptr + outs)[:, None], limit)
    up = up * tl.load(factors_ptr + size + outs)[:, None]
    up = tl.minimum(tl.maximum(up, -limit), limit)
    shares = tl.load(weights_ptr + pairs, mask=inside, other=0.0)
    inner = gate / (1.0 + tl.exp(-gate)) * up * shares[None, :]
    amax = tl.maximum(tl.max(tl.abs(inner), axis=0), 1e-4)
    scale = tl.exp2(tl.ceil(tl.log2(amax / 448.0)))
    group = pairs * (size // BLOCK_OUT) + tl.program_id(0)
    tl.store(inner_scales_ptr + group, scale, mask=inside)
    inner = _to_e4m3(inner / scale[None, :], PACKED, dtype)
    places = ((outs // 4) % 2).to(tl.int64)[:, None] * num_pairs * (size // 2)
    places += pairs.to(tl.int64)[None, :] * (size // 2) + (outs // 8 * 4 + outs % 4)[:, None]
    tl.store(inner_ptr + places, inner, mask=inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down(
    inner_ptr, inner_scales_ptr, codes_ptr, shifts_ptr, factors_ptr, out_ptr, firsts_ptr,
    experts_ptr, order_ptr, num_pairs, size_in, size,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out [pairs, size] bfloat16, of inner [2, pairs, size_in / 2]."""
    block = tl.program_id(1)
    expert, pairs, inside = block_rows(block, firsts_ptr, experts_ptr, order_ptr, BLOCK_ROWS)
    if expert < 0:
        return
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    codes_ptr += expert.to(tl.int64) * size * (size_in // 2)
    shifts_ptr += expert.to(tl.int64) * size * (size_in // 32)
    first_ptr = inner_ptr + pairs.to(tl.int64)[None, :] * (size_in // 2)
    other_ptr = first_ptr + num_pairs.to(tl.int64) * (size_in // 2)
    tile = tl.program_id(0) * (size_in // 128)
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, size_in // 2, 64):
        at = (start + tl.arange(0, 64))[:, None]
        xa = tl.load(first_ptr + at, mask=inside[None, :], other=0.0)
        xb = tl.load(other_ptr + at, mask=inside[None, :], other=0.0)
        scale = tl.load(
            inner_scales_ptr + pairs * (size_in // 128) + start // 64, mask=inside, other=0.0
        )  # fmt: skip
        a, b = _tile(codes_ptr, shifts_ptr, tile + start // 64, BLOCK_OUT, PACKED, dtype)
        part = tl.dot(a, xa)
        part = tl.dot(b, xb, part)
        total += part * scale[None, :]
    total = total * tl.load(factors_ptr + expert * size + outs)[:, None]
    places = pairs.to(tl.int64)[None, :] * size + outs[:, None]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _quantise(rows_ptr, out_ptr, scales_ptr, num_rows, size, PACKED: tl.constexpr):
    """128 channels of one row: e4m3 split into first and other fours, and their scale."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = group * 128 + tl.arange(0, 128)
    x = tl.load(rows_ptr + row * size + at).to(tl.float32)
    scale = tl.exp2(tl.ceil(tl.log2(tl.maximum(tl.max(tl.abs(x), axis=0), 1e-4) / 448.0)))
    tl.store(scales_ptr + row * (size // 128) + group, scale)
    place = (at // 4 % 2).to(tl.int64) * num_rows * (size // 2)
    place += row * (size // 2) + at // 8 * 4 + at % 4
    tl.store(out_ptr + place, _to_e4m3(x / scale, PACKED, out_ptr.dtype.element_ty))


class LaunchShape(NamedTuple):
    """Rows of a block, and Triton's own two; a program has 128 outputs, a tile."""

    block_rows: int
    num_warps: int
    num_stages: int


def default_shapes(num_pairs: int, num_experts: int) -> tuple[LaunchShape, LaunchShape]:
    """(gate and up, down), by how many rows an expert gets on average."""
    if num_pairs <= 8 * num_experts:
        return LaunchShape(16, 4, 3), LaunchShape(16, 4, 3)
    return LaunchShape(64, 8, 3), LaunchShape(64, 8, 3)


def expert_mlp_w4a8(
    hidden: torch.Tensor,
    gate_up: PackedMatrices,
    down: PackedMatrices,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: float,
    shapes: tuple[LaunchShape, LaunchShape] | None = None,
) -> torch.Tensor:
    """See reference.py; matrices are packed by `packing.pack`, sizes multiples of 128."""
    num_rows, size_in = hidden.shape
    num_choices = experts.shape[1]
    num_pairs = num_rows * num_choices
    num_experts, size = gate_up.factors.shape[0], gate_up.factors.shape[1] // 2
    if size_in % 128 or size % 128:
        raise ValueError(f"sizes must be multiples of 128, not {size_in} and {size}")
    if num_pairs == 0:
        return torch.zeros((num_rows, size_in), dtype=torch.float32, device=hidden.device)
    first, second = shapes or default_shapes(num_pairs, num_experts)
    packed = not is_interpreted()
    kind = torch.float8_e4m3fn if packed else torch.float16
    rows = torch.empty((2, num_rows, size_in // 2), dtype=kind, device=hidden.device)
    inner = torch.empty((2, num_pairs, size // 2), dtype=kind, device=hidden.device)
    wide: Any = {"dtype": torch.float32, "device": hidden.device}
    row_scales = torch.empty((num_rows, size_in // 128), **wide)
    inner_scales = torch.empty((num_pairs, size // 128), **wide)
    out = torch.empty((num_pairs, size_in), dtype=hidden.dtype, device=hidden.device)
    _quantise[(num_rows, size_in // 128)](
        hidden, rows, row_scales, num_rows, size_in, PACKED=packed, num_warps=1
    )
    blocks = cut_blocks(experts, num_experts, first.block_rows)
    _gate_up[(size // TILE, blocks.owners.numel())](
        rows, row_scales, gate_up.codes, gate_up.shifts, gate_up.factors, weights.flatten(), inner,
        inner_scales, blocks.firsts, blocks.owners, blocks.order, num_rows, num_pairs, size_in,
        size, limit, num_choices, BLOCK_ROWS=first.block_rows, BLOCK_OUT=TILE,
        PACKED=packed, num_warps=first.num_warps, num_stages=first.num_stages,
    )  # fmt: skip
    if second.block_rows != first.block_rows:
        blocks = cut_blocks(experts, num_experts, second.block_rows)
    _down[(size_in // TILE, blocks.owners.numel())](
        inner, inner_scales, down.codes, down.shifts, down.factors, out, blocks.firsts,
        blocks.owners, blocks.order, num_pairs, size, size_in,
        BLOCK_ROWS=second.block_rows, BLOCK_OUT=TILE, PACKED=packed,
        num_warps=second.num_warps, num_stages=second.num_stages,
    )  # fmt: skip
    return added(out, experts)
