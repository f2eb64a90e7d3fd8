"""Advancing decoding sequences in Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from finback.kernels.triton_launch import has_dependent_launch

_BLOCK = 128


@triton.jit
def _part(
    sampled_ptr, token_ptr, context_ptr, position_ptr, count_ptr, max_ptr, history_ptr, num_seqs,
    capacity, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK sequences."""
    if PDL:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < num_seqs
    context_len = tl.load(context_ptr + s, mask=inside, other=0)
    live = context_len > 0
    sampled = tl.load(sampled_ptr + s, mask=live, other=0)
    count = tl.load(count_ptr + s, mask=live, other=0)
    into = history_ptr + s.to(tl.int64) * capacity + count
    tl.store(into, sampled, mask=live & (count < capacity))
    tl.store(token_ptr + s, sampled.to(token_ptr.dtype.element_ty), mask=live)
    tl.store(count_ptr + s, count + 1, mask=live)
    position = tl.load(position_ptr + s, mask=live, other=0)
    tl.store(position_ptr + s, position + 1, mask=live)
    is_complete = count + 1 == tl.load(max_ptr + s, mask=live, other=0)
    tl.store(context_ptr + s, tl.where(is_complete, 0, context_len + 1), mask=live)


def advance_decode(
    sampled: torch.Tensor,
    token_ids: torch.Tensor,
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    num_sampled: torch.Tensor,
    max_sampled: torch.Tensor,
    history: torch.Tensor,
) -> None:
    """See the package's docstring."""
    num_seqs = sampled.shape[0]
    pdl = has_dependent_launch(sampled.device)
    _part[(triton.cdiv(num_seqs, _BLOCK),)](
        sampled, token_ids, context_lens, positions, num_sampled, max_sampled, history, num_seqs,
        history.shape[1], BLOCK=_BLOCK, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
