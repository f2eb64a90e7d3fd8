"""Committing a step in Triton. It never lets a dependent kernel start early (see `gather_step`)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit(do_not_specialize=["num_rows"])
def _part(
    rows_ptr, sampled_ptr, finite_ptr, last_token_ptr, out_ptr, num_rows, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(rows_ptr + 2 * at, mask=at < num_rows, other=0)
    is_live = tl.load(rows_ptr + 2 * at + 1, mask=at < num_rows, other=0) > 0
    sampled = tl.load(sampled_ptr + at, mask=is_live, other=0)
    is_finite = tl.load(finite_ptr + at, mask=is_live, other=0) != 0
    found = tl.where(is_finite, sampled, -1)
    tl.store(out_ptr + at, found, mask=is_live)
    tl.store(last_token_ptr + slot, tl.maximum(found, 0), mask=is_live)


def commit_step(
    rows: torch.Tensor,
    sampled: torch.Tensor,
    is_finite: torch.Tensor,
    last_token: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See the package's docstring; `last_token` and `out` are written."""
    num_rows = rows.shape[0]
    if num_rows:
        _part[(triton.cdiv(num_rows, _BLOCK),)](
            rows, sampled, is_finite.view(torch.int8), last_token, out, num_rows,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
