"""The clamped gate of V4's experts in Triton; routed experts have kernels of their own."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl


@triton.jit
def _gate(gate_up_ptr, out_ptr, size, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up_ptr + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    found = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + at, found.to(out_ptr.dtype.element_ty), mask=inside)


def clamped_gate(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """See reference.py, in the dtype of `gate_up` [N, 2f], which is contiguous."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        block = min(1024, triton.next_power_of_2(size))
        _gate[(num_rows, triton.cdiv(size, block))](
            gate_up, out, size, limit, BLOCK=block, num_warps=4
        )
    return out
