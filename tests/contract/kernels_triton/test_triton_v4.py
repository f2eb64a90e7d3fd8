"""V4's Triton kernels under the interpreter, at small sizes with odd edges."""

import pytest

from support.v4_checks import (
    check_experts,
    check_hyper_mix,
    check_latent_attention,
    check_rows,
)

# The interpreter turns the bounds of a loop into integers the old way.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.mark.parametrize(("rows", "top_k"), [(1, 2), (9, 3), (40, 1)])
def test_experts(rows: int, top_k: int) -> None:
    check_experts(rows, num_experts=5, size=256, inner=128, top_k=top_k)


@pytest.mark.parametrize(
    ("queries", "num_window", "num_entries", "parts"),
    [(1, 20, 37, 0), (3, 16, 0, 1), (2, 50, 90, 4), (5, 0, 7, 2)],
)
def test_latent_attention(queries: int, num_window: int, num_entries: int, parts: int) -> None:
    check_latent_attention(queries, 16, 32, num_window, num_entries, parts)


@pytest.mark.parametrize(("rows", "size"), [(1, 40), (3, 96), (17, 256)])
def test_hyper_mix(rows: int, size: int) -> None:
    check_hyper_mix(rows, size)


@pytest.mark.parametrize(("rows", "heads", "size", "ratio"), [(1, 1, 64, 4), (9, 3, 32, 128)])
def test_rows(rows: int, heads: int, size: int, ratio: int) -> None:
    check_rows(rows, heads, size, ratio)
