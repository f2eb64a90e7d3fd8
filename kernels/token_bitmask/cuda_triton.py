"""Grammar masks in Triton."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# (a Triton kernel's arguments have no Python types, and its decorator has none at all)

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _part(logits_ptr, mask_ptr, out_ptr, vocab_size, num_words, BLOCK: tl.constexpr):
    """BLOCK tokens of one row."""
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    words = tl.load(mask_ptr + row * num_words + ids // 32, mask=inside, other=0)
    is_allowed = (words >> (ids % 32)) & 1
    logits = tl.load(logits_ptr + row * vocab_size + ids, mask=inside, other=0.0)
    found = tl.where(is_allowed == 1, logits, float("-inf"))
    tl.store(out_ptr + row * vocab_size + ids, found, mask=inside)


def token_bitmask(
    logits: torch.Tensor, bitmask: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As the reference, for contiguous tensors; `out` may be `logits` itself."""
    num_rows, vocab_size = logits.shape
    if out is None:
        out = torch.empty_like(logits)
    if num_rows:
        _part[(triton.cdiv(vocab_size, _BLOCK), num_rows)](
            logits, bitmask, out, vocab_size, bitmask.shape[1], BLOCK=_BLOCK, num_warps=4
        )
    return out
