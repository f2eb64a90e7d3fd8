"""The gated activation in Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.triton_launch import has_dependent_launch

_BLOCK = 1024


@triton.jit
def _part(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK elements of one row."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    start = gate_up_ptr + row * (2 * size)
    gate = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + size + at, mask=inside, other=0.0).to(tl.float32)
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + at, found.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference, for a contiguous gate_up [rows, 2 * size]."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if not num_rows:
        return out
    # Grids hold 65535 in their second dimension; more rows come in slices.
    for start in range(0, num_rows, 65535):
        rows = min(65535, num_rows - start)
        pdl = has_dependent_launch(gate_up.device)
        _part[(triton.cdiv(size, _BLOCK), rows)](
            gate_up[start:], out[start:], size, BLOCK=_BLOCK, PDL=pdl, num_warps=4,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return out
