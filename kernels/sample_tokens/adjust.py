"""Step 1 of sampling, shared by all implementations: penalties, biases and grammar masks."""

import torch

from finback.kernels.sample_tokens import SamplingTensors
from finback.kernels.token_bitmask.reference import token_bitmask


def adjust(logits: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """The logits that tokens are chosen from; `logits` itself when nothing applies."""
    found = logits
    if params.output_counts is not None:
        found = _penalised(found, params.output_counts, params)
    if params.bias_rows is not None and params.bias_values is not None:
        if found is logits:
            found = logits.clone()
        # Indices may repeat (a bias and a forbidden id), hence accumulate.
        found.index_put_((params.bias_rows, params.bias_ids), params.bias_values, accumulate=True)
    return found if params.bitmask is None else token_bitmask(found, params.bitmask)


def _penalised(logits: torch.Tensor, counts: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """Repetition divides positive and multiplies negative logits (CTRL, Keskar et al. 2019)."""
    found = logits.clone()
    if params.repetition_penalty is not None:
        seen = counts > 0 if params.prompt_mask is None else (counts > 0) | params.prompt_mask
        factor = params.repetition_penalty[:, None]
        found = torch.where(seen, torch.where(found > 0, found / factor, found * factor), found)
    if params.frequency_penalty is not None:
        found -= params.frequency_penalty[:, None] * counts
    if params.presence_penalty is not None:
        found -= params.presence_penalty[:, None] * (counts > 0)
    return found
