"""Rows of the embedding table."""

import torch


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """table[token_ids] as float32: [rows, hidden_size]."""
    return torch.nn.functional.embedding(token_ids.long(), table).float()
