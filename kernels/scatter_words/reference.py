"""Scattering words in plain torch."""

import torch


def scatter_words(words: torch.Tensor, updates: torch.Tensor) -> None:
    """See the package's docstring; `words` is changed in place."""
    words[updates[:, 0].long()] = updates[:, 1]
