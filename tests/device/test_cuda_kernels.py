"""The Triton kernels on an NVIDIA device, at the shapes of real models."""

import importlib.util

import pytest
import torch

from support.triton_cases import QWEN3_06B, QWEN3_8B, SMOLLM2, Heads, normal
from support.triton_checks import (
    check_add_rms_norm,
    check_advance_decode,
    check_decode_attention,
    check_embedding,
    check_filter_limits,
    check_gumbel_bits,
    check_paged_attention,
    check_rotary_store_kv,
    check_sample_tokens,
    check_shared_prefixes,
    check_silu_mul,
    check_skinny_linear,
    check_step_ops,
    check_token_bitmask,
    sampling,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize(
    ("size_in", "size_out", "norm", "gated", "residual"),
    [
        (1024, 4096, True, False, False),
        (2048, 1024, False, False, True),
        (1024, 3072, True, True, False),
        (3072, 1024, False, False, True),
        (576, 960, True, False, False),
        (576, 1536, True, True, False),
        (1536, 576, False, False, True),
        (4096, 6144, True, False, False),
        (12288, 4096, False, False, True),
        (576, 49152, False, False, False),
        (1024, 151_936, False, False, False),
    ],
)
def test_skinny_linear(
    rows: int, size_in: int, size_out: int, norm: bool, gated: bool, residual: bool
) -> None:
    check_skinny_linear(rows, size_in, size_out, norm=norm, gated=gated, residual=residual)


@pytest.mark.parametrize(("rows", "size"), [(1, 576), (513, 1024), (7, 4096), (70_000, 64)])
def test_row_ops(rows: int, size: int) -> None:
    check_add_rms_norm(rows, size)
    check_silu_mul(rows, size)
    check_embedding(rows, size)


@pytest.mark.parametrize("heads", [QWEN3_06B, QWEN3_8B, SMOLLM2])
@pytest.mark.parametrize("norm", [True, False])
def test_rotary_store_kv(heads: Heads, norm: bool) -> None:
    check_rotary_store_kv(heads, 100, norm=norm)


@pytest.mark.parametrize("heads", [QWEN3_06B, QWEN3_8B, SMOLLM2])
@pytest.mark.parametrize(
    ("context_lens", "num_programs"),
    [
        ([384], 6),
        ([1], 64),
        ([8000], 66),
        ([1, 64, 65, 0, 1000, 4097], 66),
        ([200] * 70, 66),
        ([150] * 500 + [0] * 12, 132),
        ([150] * 500 + [0] * 12, 0),
        (list(range(1, 2000, 16)), 132),
    ],
)
def test_decode_attention(heads: Heads, context_lens: list[int], num_programs: int) -> None:
    check_decode_attention(heads, context_lens, num_programs, norm=heads is not SMOLLM2)


def test_decode_attention_of_a_long_context() -> None:
    check_decode_attention(QWEN3_06B, [32_768], 64, norm=True)


@pytest.mark.parametrize("heads", [QWEN3_06B, QWEN3_8B, SMOLLM2])
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 1)],
        [(128, 128)] * 9,
        [(17, 900), (1, 4000), (0, 0), (333, 333), (64, 64)],
        [(1500, 3000)],
        [(3, 700)] * 20,
    ],
)
def test_paged_attention(heads: Heads, sequences: list[tuple[int, int]]) -> None:
    check_paged_attention(heads, sequences)


@pytest.mark.parametrize("vocab_size", [49_152, 151_936])
def test_sample_tokens(vocab_size: int) -> None:
    logits = normal(9, vocab_size, scale=2.0)
    check_sample_tokens(logits, sampling(9))
    check_sample_tokens(logits, sampling(9, temperature=[0.0] * 9, is_all_greedy=True))
    check_sample_tokens(logits, sampling(9, num_logprobs=5))
    check_gumbel_bits(4)
    filtered = sampling(
        9,
        top_k=[1, 7, 0, 0, 50, 20_000, 0, 40, 0],
        top_p=[1.0, 1.0, 0.5, 0.93, 0.8, 1.0, 0.9, 0.95, 0.1],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.01, 0.2, 0.05, 0.0, 0.0],
        has_filters=True,
    )
    check_filter_limits(logits, filtered)
    check_sample_tokens(logits, filtered)


def test_small_ops() -> None:
    check_token_bitmask(5, 151_936)
    check_advance_decode()


def test_step_ops() -> None:
    check_step_ops(5, [(3, 17), (0, 1), (1, 64), (2, 0), (4, 65)], 300, 16)
    check_step_ops(300, [(s, 7 * s) for s in range(299, -1, -1)], 40, 64)
    check_step_ops(2, [(1, 0)], 4, 64)


@pytest.mark.parametrize("heads", [QWEN3_06B, QWEN3_8B, SMOLLM2])
def test_decode_attention_over_shared_prefixes(heads: Heads) -> None:
    groups = [(96, [0, 1, 2, 3]), (96, [4, 6, 8, 10]), (17, [5, 7])]
    check_shared_prefixes(heads, [6200 + 7 * s for s in range(12)], groups, 132)
    check_shared_prefixes(heads, [1100 + s for s in range(40)], [(17, [3, 9])], 132)
