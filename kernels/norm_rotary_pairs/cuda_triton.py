"""Norm and rotation in Triton: one program a head, which is read and written once."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_rotary(
    rows_ptr, cos_ptr, sin_ptr, weight_ptr, out_ptr, row_stride, num_heads, eps,
    SIZE: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Pairs (even, odd) of one head; those before the last HALF are not turned."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, SIZE // 2)
    start = rows_ptr + token * row_stride + head * SIZE
    even = tl.load(start + 2 * pairs).to(tl.float32)
    odd = tl.load(start + 2 * pairs + 1).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    if HAS_NORM:
        squares = tl.sum(even * even + odd * odd, axis=0)
        factor = 1.0 / tl.sqrt(squares / SIZE + eps)
        even, odd = even * factor, odd * factor
        if HAS_WEIGHT:
            even *= tl.load(weight_ptr + 2 * pairs).to(tl.float32)
            odd *= tl.load(weight_ptr + 2 * pairs + 1).to(tl.float32)
        even, odd = even.to(kind).to(tl.float32), odd.to(kind).to(tl.float32)
    angle = pairs - (SIZE // 2 - HALF)
    turns = angle >= 0
    cos = tl.load(cos_ptr + token * HALF + angle, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + token * HALF + angle, mask=turns, other=0.0)
    if INVERSE:
        sin = -sin
    place = out_ptr + (token * num_heads + head) * SIZE
    tl.store(place + 2 * pairs, (even * cos - odd * sin).to(kind))
    tl.store(place + 2 * pairs + 1, (even * sin + odd * cos).to(kind))


def norm_rotary_pairs(
    rows: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float | None = None,
    weight: torch.Tensor | None = None,
    inverse: bool = False,
) -> torch.Tensor:
    """See reference.py. Heads of a token lie together; tokens may be any distance apart."""
    num_rows, num_heads, size = rows.shape
    out = torch.empty((num_rows, num_heads, size), dtype=rows.dtype, device=rows.device)
    if num_rows:
        _norm_rotary[(num_rows, num_heads)](
            rows, cos, sin, cos if weight is None else weight, out, rows.stride(0), num_heads,
            0.0 if eps is None else eps, SIZE=size, HALF=cos.shape[1], HAS_NORM=eps is not None,
            HAS_WEIGHT=weight is not None, INVERSE=inverse, num_warps=1 if size <= 512 else 4,
        )  # fmt: skip
    return out
