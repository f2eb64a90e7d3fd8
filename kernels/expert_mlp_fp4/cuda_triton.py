"""The experts over 4-bit weights in Triton: each expert's weights stream by once for all its rows.

Rows are sorted by expert and cut into blocks of one expert each. A program computes some outputs of
one block, weights as the left operand: unpacked in registers, they go straight to the tensor cores.
The even and the odd columns are the low and the high halves of the bytes, so activations are split
into even and odd ones once, and each byte feeds two products without a shuffle.

e2m1 is widened by moving its bits into a bfloat16: sign, exponent and mantissa fall into place, and
the power of two by which the exponents' biases differ (2^126) is part of the scale. On a device four
bytes are unpacked at once, two values a register; elsewhere one by one.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from finback.kernels.expert_mlp_fp4.expert_blocks import added, block_rows, cut_blocks
from finback.kernels.expert_mlp_fp4.reference import GROUP, Fp4Matrices
from finback.kernels.triton_launch import is_interpreted

# t: two bytes in the high halves of 16 bits. Sign to bit 15; exponent and mantissa to bits 8 to 6.
_UNPACK: Final = tl.constexpr(
    """
    {
    .reg .b32 t, a, b;
    prmt.b32 t, $4, 0, 0x1404;
    shl.b32 a, t, 4;
    shr.b32 b, t, 2;
    and.b32 a, a, 0x80008000;
    lop3.b32 $0, b, 0x01C001C0, a, 0xEA;
    shr.b32 b, t, 6;
    and.b32 a, t, 0x80008000;
    lop3.b32 $2, b, 0x01C001C0, a, 0xEA;
    prmt.b32 t, $4, 0, 0x3424;
    shl.b32 a, t, 4;
    shr.b32 b, t, 2;
    and.b32 a, a, 0x80008000;
    lop3.b32 $1, b, 0x01C001C0, a, 0xEA;
    shr.b32 b, t, 6;
    and.b32 a, t, 0x80008000;
    lop3.b32 $3, b, 0x01C001C0, a, 0xEA;
    }
    """
)


@triton.jit
def _unpacked(codes, PACKED: tl.constexpr):
    """(low, high) halves of uint8 codes: packed as bfloat16 2^126 too small, else as float32."""
    if PACKED:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low, high = _value(codes & 15), _value(codes >> 4)
    return low, high


@triton.jit
def _value(code):
    """float32 of one e2m1 code a byte."""
    wide = code.to(tl.int32)
    exponent, half = (wide >> 1) & 3, (wide & 1).to(tl.float32) * 0.5
    magnitude = tl.where(exponent == 0, half, (1.0 + half) * tl.exp2((exponent - 1).to(tl.float32)))
    return tl.where(wide >= 8, -magnitude, magnitude)


@triton.jit
def _factors(scales, PACKED: tl.constexpr):
    """2^(scale - 127); packed bfloat16 with the 2^126 that the codes lack, a scale of 0 taken as 1."""
    if PACKED:
        bits = (tl.maximum(scales, 1).to(tl.uint16) + 126) << 7
        factors = bits.to(tl.bfloat16, bitcast=True)
    else:
        factors = tl.exp2(scales.to(tl.float32) - 127.0)
    return factors


@triton.jit
def _tile(
    codes_ptr, scales_ptr, outs, start, size_in, BLOCK_OUT: tl.constexpr, BYTES: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """(even, odd) columns of weights [BLOCK_OUT, BYTES], from byte column `start` on."""
    per_group: tl.constexpr = 16
    at = start + tl.arange(0, BYTES)
    codes = tl.load(codes_ptr + outs[:, None] * (size_in // 2) + at[None, :])
    groups = start // per_group + tl.arange(0, BYTES // per_group)
    scales = tl.load(scales_ptr + outs[:, None] * (size_in // 32) + groups[None, :])
    factors = _factors(scales, PACKED)[:, :, None]
    low, high = _unpacked(codes, PACKED)
    shape: tl.constexpr = [BLOCK_OUT, BYTES // per_group, per_group]
    low = (tl.reshape(low, shape) * factors).to(DTYPE)
    high = (tl.reshape(high, shape) * factors).to(DTYPE)
    return tl.reshape(low, [BLOCK_OUT, BYTES]), tl.reshape(high, [BLOCK_OUT, BYTES])


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up(
    even_ptr, odd_ptr, codes_ptr, scales_ptr, weights_ptr, inner_ptr, firsts_ptr, experts_ptr,
    order_ptr, num_pairs, size_in, size, limit, num_choices,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BYTES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """inner [2, pairs, size / 2] (even and odd features): weight * silu(gate) * up, both clamped."""
    block = tl.program_id(1)
    expert, pairs, inside = block_rows(block, firsts_ptr, experts_ptr, order_ptr, BLOCK_ROWS)
    if expert < 0:
        return
    dtype: tl.constexpr = even_ptr.dtype.element_ty
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    codes_ptr += expert.to(tl.int64) * (2 * size) * (size_in // 2)
    scales_ptr += expert.to(tl.int64) * (2 * size) * (size_in // 32)
    rows = (pairs // num_choices) * (size_in // 2)
    gate = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    up = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, size_in // 2, BYTES):
        at = start + tl.arange(0, BYTES)
        even = tl.load(even_ptr + rows[None, :] + at[:, None], mask=inside[None, :], other=0.0)
        odd = tl.load(odd_ptr + rows[None, :] + at[:, None], mask=inside[None, :], other=0.0)
        low, high = _tile(
            codes_ptr, scales_ptr, outs, start, size_in, BLOCK_OUT, BYTES, PACKED, dtype
        )
        gate = tl.dot(low, even, gate)
        gate = tl.dot(high, odd, gate)
        low, high = _tile(
            codes_ptr, scales_ptr, size + outs, start, size_in, BLOCK_OUT, BYTES, PACKED, dtype
        )
        up = tl.dot(low, even, up)
        up = tl.dot(high, odd, up)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    shares = tl.load(weights_ptr + pairs, mask=inside, other=0.0)
    inner = gate / (1.0 + tl.exp(-gate)) * up * shares[None, :]
    places = (outs % 2).to(tl.int64)[:, None] * num_pairs * (size // 2)
    places += pairs[None, :] * (size // 2) + outs[:, None] // 2
    tl.store(inner_ptr + places, inner.to(inner_ptr.dtype.element_ty), mask=inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _down(
    inner_ptr, codes_ptr, scales_ptr, out_ptr, firsts_ptr, experts_ptr, order_ptr,
    num_pairs, size_in, size,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BYTES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """out [pairs, size] bfloat16, of inner [2, pairs, size_in / 2]."""
    block = tl.program_id(1)
    expert, pairs, inside = block_rows(block, firsts_ptr, experts_ptr, order_ptr, BLOCK_ROWS)
    if expert < 0:
        return
    dtype: tl.constexpr = inner_ptr.dtype.element_ty
    outs = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    codes_ptr += expert.to(tl.int64) * size * (size_in // 2)
    scales_ptr += expert.to(tl.int64) * size * (size_in // 32)
    rows = pairs.to(tl.int64) * (size_in // 2)
    odd_ptr = inner_ptr + num_pairs.to(tl.int64) * (size_in // 2)
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], dtype=tl.float32)
    for start in range(0, size_in // 2, BYTES):
        at = start + tl.arange(0, BYTES)
        even = tl.load(inner_ptr + rows[None, :] + at[:, None], mask=inside[None, :], other=0.0)
        odd = tl.load(odd_ptr + rows[None, :] + at[:, None], mask=inside[None, :], other=0.0)
        low, high = _tile(
            codes_ptr, scales_ptr, outs, start, size_in, BLOCK_OUT, BYTES, PACKED, dtype
        )
        total = tl.dot(low, even, total)
        total = tl.dot(high, odd, total)
    places = pairs.to(tl.int64)[None, :] * size + outs[:, None]
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=inside[None, :])


class LaunchShape(NamedTuple):
    """Rows of a block, outputs of a program, bytes of weights a step, and Triton's own two."""

    block_rows: int
    block_out: int
    num_bytes: int
    num_warps: int
    num_stages: int


def default_shapes(num_pairs: int, num_experts: int) -> tuple[LaunchShape, LaunchShape]:
    """(gate and up, down), by how many rows an expert gets on average."""
    if num_pairs <= 8 * num_experts:
        return LaunchShape(16, 64, 64, 4, 4), LaunchShape(16, 64, 64, 4, 4)
    if num_pairs <= 64 * num_experts:
        return LaunchShape(64, 64, 64, 4, 2), LaunchShape(64, 64, 64, 4, 2)
    return LaunchShape(128, 64, 64, 4, 2), LaunchShape(128, 64, 64, 4, 2)


def expert_mlp_fp4(
    hidden: torch.Tensor,
    gate_up: Fp4Matrices,
    down: Fp4Matrices,
    experts: torch.Tensor,
    weights: torch.Tensor,
    *,
    limit: float,
    shapes: tuple[LaunchShape, LaunchShape] | None = None,
    is_packed: bool | None = None,
) -> torch.Tensor:
    """See reference.py. Sizes are multiples of 128. `shapes`, `is_packed`: for measurements."""
    num_rows, size_in = hidden.shape
    num_choices = experts.shape[1]
    num_pairs = num_rows * num_choices
    size = gate_up.codes.shape[1] // 2
    num_experts = gate_up.codes.shape[0]
    if size_in % (4 * GROUP) or size % (4 * GROUP):
        raise ValueError(f"sizes must be multiples of {4 * GROUP}, not {size_in} and {size}")
    if num_pairs == 0:
        return torch.zeros((num_rows, size_in), dtype=torch.float32, device=hidden.device)
    first, second = shapes or default_shapes(num_pairs, num_experts)
    packed = not is_interpreted() if is_packed is None else is_packed
    halves = hidden.view(num_rows, size_in // 2, 2).permute(2, 0, 1).contiguous()
    inner = torch.empty((2, num_pairs, size // 2), dtype=hidden.dtype, device=hidden.device)
    out = torch.empty((num_pairs, size_in), dtype=hidden.dtype, device=hidden.device)
    blocks = cut_blocks(experts, num_experts, first.block_rows)
    grid = (triton.cdiv(size, first.block_out), blocks.owners.numel())
    _gate_up[grid](
        halves[0], halves[1], gate_up.codes, gate_up.scales, weights.flatten(), inner,
        blocks.firsts, blocks.owners, blocks.order, num_pairs, size_in, size, limit, num_choices,
        BLOCK_ROWS=first.block_rows, BLOCK_OUT=first.block_out, BYTES=first.num_bytes,
        PACKED=packed, num_warps=first.num_warps, num_stages=first.num_stages,
    )  # fmt: skip
    if second.block_rows != first.block_rows:
        blocks = cut_blocks(experts, num_experts, second.block_rows)
    grid = (triton.cdiv(size_in, second.block_out), blocks.owners.numel())
    _down[grid](
        inner, down.codes, down.scales, out, blocks.firsts, blocks.owners, blocks.order,
        num_pairs, size, size_in,
        BLOCK_ROWS=second.block_rows, BLOCK_OUT=second.block_out, BYTES=second.num_bytes,
        PACKED=packed, num_warps=second.num_warps, num_stages=second.num_stages,
    )  # fmt: skip
    return added(out, experts)
