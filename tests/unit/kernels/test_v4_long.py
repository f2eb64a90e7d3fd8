"""The selection of entries at lengths of long contexts."""

import pytest
import torch

from finback.kernels.select_entries.reference import select_entries

TOP_K = 512


@pytest.mark.parametrize("num_entries", [2048, 8192, 32768, 131072])
def test_the_best_of_many_entries(num_entries: int) -> None:
    """Scores are known and all unlike; the last row sees everything, the others less or nothing."""
    generator = torch.Generator().manual_seed(num_entries)
    scores = torch.randperm(num_entries, generator=generator) / num_entries  # exact in float32
    places = torch.randperm(num_entries, generator=generator).to(torch.int32)
    keys = torch.empty(num_entries, 1)
    keys[places.long(), 0] = scores
    visible = torch.tensor([0, 100, num_entries - 1, num_entries])
    one = torch.ones(4, 1)
    found = select_entries(one[:, :, None], one, keys, places.expand(4, -1), visible, TOP_K)
    for row, count in enumerate(visible.tolist()):
        best = set(scores[:count].sort(descending=True).indices[:TOP_K].tolist())
        chosen = [entry for entry in found[row].tolist() if entry >= 0]
        assert set(chosen) == best and len(chosen) == len(best)
