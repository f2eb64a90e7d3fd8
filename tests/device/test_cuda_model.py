"""The CUDA network against the plain one in float32, on random and on real weights."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finback.kernels import dispatch
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.random_weights import RandomWeights
from finback.shared.models.transformer import Transformer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]

Record = Callable[[str, object], None]
BLOCK_SIZE = 64
QWEN3 = ModelConfig(
    architecture="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
    num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128, rope_theta=1e6,
    rms_norm_eps=1e-6, max_model_len=4096, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
GGUF = os.environ.get("FINBACK_TEST_GGUF", "")


def batch_of(sequences: list[tuple[list[int], int]]) -> ForwardBatch:
    """`sequences`: (tokens to feed, tokens before them); sequence s has blocks from 1 + 16 * s."""
    ids, positions, slots, tables, ends, lens = [], [], [], [], [0], []
    for s, (tokens, past) in enumerate(sequences):
        table = list(range(1 + 16 * s, 17 + 16 * s))
        for p in range(past, past + len(tokens)):
            positions.append(p)
            slots.append(table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
        ids += tokens
        tables.append(table)
        ends.append(len(ids))
        lens.append(past + len(tokens))

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return ForwardBatch(
        token_ids=tensor(ids), positions=tensor(positions), slot_mapping=tensor(slots),
        block_tables=tensor(tables), cu_seqlens=tensor(ends), context_lens=tensor(lens),
        max_q=max(len(tokens) for tokens, _ in sequences), max_context=max(lens),
        logit_rows=torch.arange(len(ids), device="cuda"),
    )  # fmt: skip


def logits_of(model: Any, steps: list[list[tuple[list[int], int]]]) -> list[torch.Tensor]:
    """Each step's logits over a fresh pool."""
    kv = model.new_pool(1 + 16 * max(len(step) for step in steps), BLOCK_SIZE)
    return [model.logits(model.forward(batch_of(step), kv)).clone() for step in steps]


def some_steps(vocab_size: int) -> list[list[tuple[list[int], int]]]:
    """A prompt of chunks, single tokens beside chunks, and batches of single tokens only."""
    generator = torch.Generator().manual_seed(5)

    def ids(count: int) -> list[int]:
        return torch.randint(0, vocab_size, (count,), generator=generator).tolist()

    return [
        [(ids(100), 0), (ids(3), 0), (ids(200), 0)],
        [(ids(1), 100), (ids(64), 3), (ids(1), 200)],
        [(ids(1), 101), (ids(1), 67), (ids(1), 201)],
        [(ids(1), 102), (ids(1), 68), (ids(1), 202)],
        [(ids(1), 103)],
        [(ids(1), 104)],
        [(ids(1), 10)] * 40,
    ]


def check_against_float32(config: ModelConfig, reader: Any) -> dict[str, float]:
    """The fused network is about as near to float32 as the plain one in bfloat16.

    Over all steps within a fifth; in one step, which may be a single row, within twice the largest.
    """
    from finback.shared.models.cuda_transformer import CudaTransformer

    steps = some_steps(config.vocab_size)
    plain = dispatch.select_all("cuda", "reference")

    def plain_logits(mode: str, dtype: torch.dtype) -> list[torch.Tensor]:
        model = Transformer(config, reader, plain, device="cuda", mode=mode, dtype=dtype)
        return logits_of(model, steps)

    truth = plain_logits("reference", torch.float32)
    allowed = _errors(plain_logits("fast", torch.bfloat16), truth)
    ratios = {}
    fused = logits_of(CudaTransformer(config, reader, plain), steps)
    errors = _errors(fused, truth)
    ratios["fused"] = sum(errors) / sum(allowed)
    assert sum(errors) < 1.2 * sum(allowed), (errors, allowed)
    assert max(errors) < 2.0 * max(allowed), (errors, allowed)
    return ratios


def _errors(found: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Relative error of each step's logits."""
    return [
        float((some - wanted).norm() / wanted.norm())
        for some, wanted in zip(found, truth, strict=True)
    ]


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """Products in full float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("no_tf32")
def test_random_qwen3_is_near_to_float32(record_property: Record) -> None:
    record_property(
        "error_ratios", check_against_float32(QWEN3, RandomWeights(QWEN3, device="cuda"))
    )


@pytest.mark.usefixtures("no_tf32")
def test_random_llama_is_near_to_float32(record_property: Record) -> None:
    config = replace(
        QWEN3, architecture="llama", qk_norm=False, hidden_size=576, intermediate_size=1536,
        num_layers=6, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49_152,
    )  # fmt: skip
    record_property(
        "error_ratios", check_against_float32(config, RandomWeights(config, device="cuda"))
    )


@pytest.mark.usefixtures("no_tf32")
@pytest.mark.skipif(not GGUF, reason="FINBACK_TEST_GGUF names no file")
def test_real_weights_are_near_to_float32(record_property: Record) -> None:
    from finback.shared.models.loader import open_weights
    from finback.shared.models.source import open_source

    source = open_source(str(Path(GGUF)))
    record_property("error_ratios", check_against_float32(source.dense, open_weights(source)))


def test_the_loop_samples_what_single_steps_sample() -> None:
    """Device-resident decoding gives the tokens of steps whose state goes through the host."""
    from finback.kernels.sample_tokens import greedy
    from finback.kernels.sample_tokens.cuda_triton import sample_tokens
    from finback.shared.models.cuda_decode_loop import DecodeLoop, new_state
    from finback.shared.models.cuda_transformer import CudaTransformer

    config = replace(QWEN3, num_layers=4)
    model = CudaTransformer(
        config, RandomWeights(config, device="cuda"), dispatch.select_all("cuda", "fast")
    )
    prompt, past = [(list(range(50, 120)), 0), (list(range(9)), 0)], [70, 9]
    kv = model.new_pool(33, BLOCK_SIZE)
    hidden = model.forward(batch_of(prompt), kv)[torch.tensor([69, 78], device="cuda")]
    first = sample_tokens(model.logits(hidden), greedy(2, "cuda")).token_ids.tolist()
    state = new_state(2, 6, 16, "cuda")
    loop = DecodeLoop(model, kv, state, 0.0)
    state.token_ids.copy_(torch.tensor(first))
    state.context_lens.copy_(torch.tensor(past) + 1)
    state.positions.copy_(torch.tensor(past) + 1)
    state.max_sampled.fill_(5)
    state.block_tables.copy_(batch_of(prompt).block_tables)
    for _ in range(7):
        loop.step()
    tokens, wanted = first, []
    for step in range(5):
        batch = batch_of([([tokens[s]], past[s] + step) for s in range(2)])
        logits = model.logits(model.forward(batch, kv))
        tokens = sample_tokens(logits, greedy(2, "cuda")).token_ids.tolist()
        wanted.append(tokens)
    assert state.history[:, :5].tolist() == [list(row) for row in zip(*wanted, strict=True)]
    assert state.history[:, 5].tolist() == [0, 0]
    assert state.context_lens.tolist() == [0, 0]
