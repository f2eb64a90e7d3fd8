"""The engine on an NVIDIA device: chunks, mixed steps, graphs and sampling together."""

import asyncio
import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from finback.kernels import dispatch
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec, TokenIds
from finback.shared.errors import InvariantViolated
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.config import ModelConfig
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.random_weights import RandomWeights
from finback.shared.models.transformer import Transformer
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, Driver, generate

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


def gaps(truth: Transformer, spec: SequenceSpec, tokens: list[int]) -> list[float]:
    """How far each greedy token's float32 logit lies under the largest one."""
    prompt = spec.token_ids.tolist()
    rows = true_logits(truth, prompt + tokens)[len(prompt) - 1 : -1]
    chosen = torch.tensor(tokens, device="cuda")
    found: list[float] = (rows.max(1).values - rows.gather(1, chosen[:, None])[:, 0]).tolist()
    return found


# Room for all; blocks for a few, so that sequences are preempted; chunks of a few rows.
SETTINGS = {
    "roomy": ENGINE,
    "tight": replace(ENGINE, num_blocks=18, max_num_seqs=8),
    "small chunks": replace(ENGINE, max_num_batched_tokens=24),
    "waiting for each step": replace(ENGINE, overlap_below_ms=0.0),
}


@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("drafting", [False, True])
def test_greedy_tokens_are_the_likeliest(setting: str, drafting: bool) -> None:
    from finback.shared.models.cuda_transformer import CudaTransformer

    reader = RandomWeights(CONFIG, device="cuda")
    kernels = dispatch.select_all("cuda", "reference")
    wanted = [
        replace(spec, drafting=drafting)
        for spec in specs(SamplingSpec(temperature=0.0, ignore_eos=True))
    ]
    model = CudaTransformer(CONFIG, reader, kernels)
    found = generate(model, SETTINGS[setting], wanted, drafter=repeat_last)
    truth = Transformer(
        CONFIG, reader, kernels, device="cuda", mode="reference", dtype=torch.float32
    )
    for spec, completion in zip(wanted, found, strict=True):
        assert len(completion.tokens) == spec.sampling.max_tokens
        most = max(gaps(truth, spec, completion.tokens))
        assert most < TOLERANCE, (spec.key, most)


def repeat_last(_spec: SequenceSpec, known: TokenIds, _position: int) -> TokenIds:
    """A drafter that is nearly always wrong."""
    return np.repeat(known[-1:], 3)


def test_sequences_over_a_shared_prefix() -> None:
    from finback.shared.models.cuda_transformer import CudaTransformer

    config = replace(CONFIG, max_model_len=2048)
    reader = RandomWeights(config, device="cuda")
    kernels = dispatch.select_all("cuda", "reference")
    prefix = np.random.default_rng(5).integers(0, config.vocab_size, 1300).astype(np.int32)
    wanted = [
        replace(spec, token_ids=np.concatenate((prefix, spec.token_ids[:40])))
        for spec in specs(SamplingSpec(temperature=0.0, ignore_eos=True))
    ]
    settings = replace(ENGINE, num_blocks=400, max_num_batched_tokens=512)

    async def main() -> list[Completion]:
        model = CudaTransformer(config, reader, kernels)
        async with Driver(model, settings) as driver:
            return await driver.run(wanted[:1]) + await driver.run(wanted[1:])

    truth = Transformer(
        config, reader, kernels, device="cuda", mode="reference", dtype=torch.float32
    )
    for index, (spec, completion) in enumerate(zip(wanted, asyncio.run(main()), strict=True)):
        assert completion.end is not None
        assert completion.end.num_cached_tokens == (1280 if index else 0)
        assert max(gaps(truth, spec, completion.tokens)) < TOLERANCE


def test_what_needs_the_host_mixes_with_what_does_not() -> None:
    """Biases and logprobs in every other sequence; greedy tokens are the likeliest all the same."""
    from finback.shared.models.cuda_transformer import CudaTransformer

    reader = RandomWeights(CONFIG, device="cuda")
    kernels = dispatch.select_all("cuda", "reference")
    plain = SamplingSpec(temperature=0.0, ignore_eos=True)
    wanted = specs(plain)
    for index in range(0, len(wanted), 2):
        sampling = replace(wanted[index].sampling, num_logprobs=2, max_tokens=3 + index)
        wanted[index] = replace(wanted[index], sampling=sampling)
    found = generate(CudaTransformer(CONFIG, reader, kernels), ENGINE, wanted)
    truth = Transformer(
        CONFIG, reader, kernels, device="cuda", mode="reference", dtype=torch.float32
    )
    for spec, completion in zip(wanted, found, strict=True):
        assert len(completion.tokens) == spec.sampling.max_tokens
        assert max(gaps(truth, spec, completion.tokens)) < TOLERANCE
        assert len(completion.logprobs) == (
            0 if spec.sampling.num_logprobs is None else len(completion.tokens)
        )


def test_a_launch_that_waits_for_the_device_fails_the_engine() -> None:
    from finback.shared.models.cuda_transformer import CudaTransformer

    class Waiting(CudaTransformer):
        """Reads a value of each chunk that is longer than the warm-up's."""

        def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
            hidden = super().forward(batch, kv)
            if batch.num_rows > 64:
                hidden.sum().item()
            return hidden

    model = Waiting(
        CONFIG, RandomWeights(CONFIG, device="cuda"), dispatch.select_all("cuda", "fast")
    )
    wanted = specs(SamplingSpec(temperature=0.0, ignore_eos=True))
    short = [spec for spec in wanted if spec.token_ids.size < 10]
    assert all(completion.end is not None for completion in generate(model, ENGINE, short))
    with pytest.raises(InvariantViolated, match="the engine failed") as caught:
        generate(model, ENGINE, wanted)
    assert "synchroniz" in str(caught.value.__cause__)


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
