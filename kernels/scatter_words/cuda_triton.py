"""Scattering words in Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl

_BLOCK = 256


# The count changes with every call, and no call may find its kernel not compiled yet.
@triton.jit(do_not_specialize=["count"])
def _part(words_ptr, updates_ptr, count, BLOCK: tl.constexpr):
    """BLOCK updates."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    index = tl.load(updates_ptr + 2 * at, mask=inside, other=0)
    value = tl.load(updates_ptr + 2 * at + 1, mask=inside, other=0)
    tl.store(words_ptr + index, value, mask=inside)


def scatter_words(words: torch.Tensor, updates: torch.Tensor) -> None:
    """See the package's docstring; `words` is changed in place."""
    count = updates.shape[0]
    if count:
        _part[(triton.cdiv(count, _BLOCK),)](words, updates, count, BLOCK=_BLOCK, num_warps=4)
