"""Triton kernels under the interpreter equal their references; the same checks run on a device."""

import pytest
import torch

from support.triton_cases import QWEN3_06B, SMOLLM2, Heads, device, normal
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

TINY = Heads(num_heads=4, num_kv_heads=2, head_dim=32)


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize(("size_in", "size_out"), [(576, 96), (1024, 40), (1536, 64)])
@pytest.mark.parametrize(
    ("norm", "gated", "residual"),
    [(False, False, False), (True, False, False), (True, True, False), (False, False, True)],
)
def test_skinny_linear(
    rows: int, size_in: int, size_out: int, norm: bool, gated: bool, residual: bool
) -> None:
    check_skinny_linear(rows, size_in, size_out, norm=norm, gated=gated, residual=residual)


@pytest.mark.parametrize(("rows", "size"), [(1, 576), (3, 1024), (0, 64)])
def test_row_ops(rows: int, size: int) -> None:
    check_add_rms_norm(rows, size)
    check_silu_mul(rows, size)
    check_embedding(rows, size)


@pytest.mark.parametrize("heads", [QWEN3_06B, SMOLLM2])
@pytest.mark.parametrize("norm", [True, False])
def test_rotary_store_kv(heads: Heads, norm: bool) -> None:
    check_rotary_store_kv(heads, 5, norm=norm)


@pytest.mark.parametrize(("heads", "norm"), [(TINY, True), (SMOLLM2, False)])
@pytest.mark.parametrize("num_programs", [0, 1, 5])
def test_decode_attention(heads: Heads, num_programs: int, norm: bool) -> None:
    check_decode_attention(heads, [1, 0, 64, 65, 200], num_programs, norm=norm)


def test_decode_attention_of_many_parts() -> None:
    """More programs than a join takes at once, padding at both ends, sequences inside of one share."""
    lens = [0, 0, 700, 1, 2, 3, 0, 90, 5, 0]
    check_decode_attention(TINY, lens, 12, norm=True, tile=64)
    check_decode_attention(TINY, [0, 0, 0], 3, norm=True)


@pytest.mark.parametrize(
    "sequences",
    [[(1, 1)], [(5, 5), (1, 90), (40, 64)], [(70, 200), (0, 0), (3, 65)], [(130, 130)]],
)
def test_paged_attention(sequences: list[tuple[int, int]]) -> None:
    check_paged_attention(SMOLLM2 if len(sequences) == 1 else TINY, sequences)


def test_sample_tokens_without_filters() -> None:
    logits = normal(6, 9000, scale=3.0)
    check_sample_tokens(logits, sampling(6))
    check_sample_tokens(logits, sampling(6, temperature=[0.0] * 6, is_all_greedy=True))
    check_sample_tokens(logits, sampling(6, temperature=[0.0, 1.5, 0.0, 0.2, 5.0, 1.0]))
    check_sample_tokens(logits, sampling(6, num_logprobs=3))
    check_gumbel_bits(4)


def test_sample_tokens_flags_what_is_not_sound() -> None:
    logits = normal(4, 9000)
    logits[0, 8999] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    check_sample_tokens(logits, sampling(4))
    check_sample_tokens(logits, sampling(4, temperature=[0.0] * 4, is_all_greedy=True))


def test_filters() -> None:
    logits = normal(6, 1500, scale=3.0)
    params = sampling(
        6, top_k=[1, 7, 0, 0, 50, 2000], top_p=[1.0, 1.0, 0.5, 0.93, 0.8, 1.0],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.01, 0.2], has_filters=True,
    )  # fmt: skip
    check_filter_limits(logits, params)
    check_sample_tokens(logits, params)


@pytest.mark.parametrize("scale", [0.5, 12.0])
def test_filters_with_many_candidates_and_with_few(scale: float) -> None:
    logits = normal(6, 9000, scale=scale)
    params = sampling(
        6, top_k=[5000, 7, 0, 0, 50, 3], top_p=[1.0, 1.0, 0.5, 0.97, 0.8, 0.9999],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.01, 0.0], has_filters=True,
    )  # fmt: skip
    check_filter_limits(logits, params)


def test_masks_and_penalties_come_before_the_choice() -> None:
    logits = normal(3, 1000)
    words = torch.zeros((3, 32), dtype=torch.int32, device=device())
    words[:, 5] = 0b1010
    check_sample_tokens(logits, sampling(3, bitmask=words))
    check_token_bitmask(3, 1000)


def test_advance_decode() -> None:
    check_advance_decode()


def test_step_ops() -> None:
    check_step_ops(5, [(3, 17), (0, 1), (1, 64), (2, 0), (4, 65)], 300, 16)
    check_step_ops(300, [(s, 7 * s) for s in range(299, -1, -1)], 40, 64)
    check_step_ops(2, [(1, 0)], 4, 64)


def test_decode_attention_over_shared_prefixes() -> None:
    groups = [(2, [0, 2, 5]), (1, [3, 4])]
    check_shared_prefixes(TINY, [150, 70, 200, 66, 65, 129, 0], groups, 4)
    check_shared_prefixes(SMOLLM2, [150, 70, 200], [(2, [0, 2])], 2)
