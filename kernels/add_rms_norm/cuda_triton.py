"""Residual addition and norm in Triton: a program a row."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.triton_launch import has_dependent_launch


@triton.jit
def _row(
    residual_ptr, added_ptr, weight_ptr, out_ptr, size, eps,
    HAS_ADDED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    at = tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    start = tl.program_id(0).to(tl.int64) * size
    x = tl.load(residual_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_ptr + start + at, x.to(residual_ptr.dtype.element_ty), mask=inside)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(out_ptr + start + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """See the package's docstring; all tensors are contiguous. Returns `out`."""
    num_rows, size = residual.shape
    if not num_rows:
        return out
    pdl = has_dependent_launch(residual.device)
    block = triton.next_power_of_2(size)
    _row[(num_rows,)](
        residual, residual if added is None else added, weight, out, size, eps,
        HAS_ADDED=added is not None, BLOCK=block, PDL=pdl, num_warps=8 if block > 2048 else 4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
