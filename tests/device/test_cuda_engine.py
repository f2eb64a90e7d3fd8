"""The engine on an NVIDIA device: chunks, mixed steps, graphs and sampling together."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from finback.kernels import dispatch
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.random_weights import RandomWeights
from finback.shared.models.transformer import Transformer
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import generate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]

CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=151_936, hidden_size=1024, intermediate_size=3072,
    num_layers=4, num_heads=16, num_kv_heads=8, head_dim=128, rope_theta=1e6,
    rms_norm_eps=1e-6, max_model_len=1024, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
ENGINE = EngineConfig(
    num_blocks=200, max_num_seqs=24, max_num_batched_tokens=128, device="cuda", mode="fast"
)
# Four times the largest error of a bfloat16 logit seen here.
TOLERANCE = 0.25


def specs(sampling: SamplingSpec) -> list[SequenceSpec]:
    """Prompts from one token to several chunks."""
    source = np.random.default_rng(3)
    return [
        SequenceSpec(
            key=(f"r{index}", 0),
            attempt=1,
            token_ids=source.integers(0, CONFIG.vocab_size, length).astype(np.int32),
            sampling=replace(sampling, max_tokens=5 + 3 * index),
            seed=index,
        )
        for index, length in enumerate((1, 2, 63, 64, 65, 130, 300, 17, 40, 5, 9, 200))
    ]


def true_logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """float32 logits of every position of one sequence, computed at once."""

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    count = len(tokens)
    width = -(-count // 64)
    batch = ForwardBatch(
        token_ids=tensor(tokens), positions=tensor(list(range(count))),
        slot_mapping=tensor(list(range(count))), block_tables=tensor(list(range(width)))[None],
        cu_seqlens=tensor([0, count]), context_lens=tensor([count]), max_q=count,
        max_context=count, logit_rows=torch.arange(count, device="cuda"),
    )  # fmt: skip
    return model.logits(model.forward(batch, model.new_pool(width, 64)))


def test_greedy_tokens_are_the_likeliest() -> None:
    from finback.shared.models.cuda_transformer import CudaTransformer

    reader = RandomWeights(CONFIG, device="cuda")
    kernels = dispatch.select_all("cuda", "reference")
    wanted = specs(SamplingSpec(temperature=0.0, ignore_eos=True))
    found = generate(CudaTransformer(CONFIG, reader, kernels), ENGINE, wanted)
    truth = Transformer(
        CONFIG, reader, kernels, device="cuda", mode="reference", dtype=torch.float32
    )
    for spec, completion in zip(wanted, found, strict=True):
        assert len(completion.tokens) == spec.sampling.max_tokens
        prompt = spec.token_ids.tolist()
        logits = true_logits(truth, prompt + completion.tokens)
        rows = logits[len(prompt) - 1 : -1]
        chosen = torch.tensor(completion.tokens, device="cuda")
        gap = rows.max(1).values - rows.gather(1, chosen[:, None])[:, 0]
        assert float(gap.max()) < TOLERANCE, (spec.key, gap.tolist())


def test_every_kind_of_sampling_runs() -> None:
    from finback.shared.models.cuda_transformer import CudaTransformer

    model = CudaTransformer(
        CONFIG, RandomWeights(CONFIG, device="cuda"), dispatch.select_all("cuda", "fast")
    )
    for sampling in (
        SamplingSpec(temperature=0.6, ignore_eos=True),
        SamplingSpec(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, ignore_eos=True),
        SamplingSpec(
            temperature=0.8, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1,
            logit_bias={7: 3.0}, num_logprobs=3, ignore_eos=True,
        ),
    ):  # fmt: skip
        wanted = specs(sampling)
        first, second = generate(model, ENGINE, wanted), generate(model, ENGINE, wanted)
        for spec, one, other in zip(wanted, first, second, strict=True):
            assert len(one.tokens) == spec.sampling.max_tokens
            assert max(one.tokens) < CONFIG.vocab_size
            assert len(other.tokens) == len(one.tokens)
