"""V4's Triton kernels on an NVIDIA device, at the widths of V4-Flash."""

import importlib.util

import pytest
import torch

from support.v4_checks import check_experts, check_hyper_mix, check_latent_attention, check_rows

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]


@pytest.mark.parametrize("rows", [1, 7, 64, 300, 2048])
def test_experts(rows: int) -> None:
    check_experts(rows, num_experts=24, size=4096, inner=2048, top_k=6)


@pytest.mark.parametrize("queries", [1, 16, 130])
@pytest.mark.parametrize(("num_window", "num_entries"), [(128, 0), (128, 8), (128, 512)])
def test_latent_attention(queries: int, num_window: int, num_entries: int) -> None:
    check_latent_attention(queries, 64, 512, num_window, num_entries, parts=0)


@pytest.mark.parametrize("rows", [1, 65, 1500])
def test_hyper_mix(rows: int) -> None:
    check_hyper_mix(rows, 4096)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("rows", [1, 64])
def test_rows(rows: int, ratio: int) -> None:
    check_rows(rows, 64, 512, ratio)
