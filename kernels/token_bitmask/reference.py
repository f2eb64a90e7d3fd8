"""Grammar masks: bits that allow tokens."""

import torch


def token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Logits with the forbidden tokens at -inf, as a new tensor.

    logits: [rows, vocab_size] float32. bitmask: [rows, ceil(vocab_size / 32)] int32; bit i of word w
    allows token 32 * w + i.
    """
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, float("-inf"))
