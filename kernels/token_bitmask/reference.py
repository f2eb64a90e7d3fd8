"""Grammar masks: bits that allow tokens."""

import numpy as np
import torch


def token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Logits with the forbidden tokens at -inf, as a new tensor.

    logits: [rows, vocab_size] float32. bitmask: [rows, ceil(vocab_size / 32)] int32; bit i of word w
    allows token 32 * w + i.
    """
    if logits.device.type == "cpu":
        return _on_host(logits, bitmask)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[:, :, None] >> bits) & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(~allowed, float("-inf"))


def _on_host(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """The same by bytes, in a fraction of the time: bits to bytes is one instruction on a CPU."""
    data = bitmask.contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    forbidden = np.unpackbits(~data, axis=1, bitorder="little", count=logits.shape[1])
    return logits.masked_fill(torch.from_numpy(forbidden).view(torch.bool), float("-inf"))
