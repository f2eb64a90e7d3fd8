"""A sliding-window model on an NVIDIA device: rings, snapshots and replay as on the CPU."""

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from finback.kernels import dispatch
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.config import ModelConfig
from finback.shared.models.random_weights import RandomWeights
from finback.shared.models.windowed import WindowedTransformer
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import generate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]

CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=512, hidden_size=256, intermediate_size=512,
    num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64, rope_theta=1e4,
    rms_norm_eps=1e-6, max_model_len=512, qk_norm=True,
    window_layers=(0, 1, 2, 4, 5, 6), sliding_window=24,
)  # fmt: skip
ENGINE = EngineConfig(
    num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=96, device="cuda"
)


def _model(device: str, mode: Any) -> WindowedTransformer:
    kernels = dispatch.select_all(device, mode)
    reader = RandomWeights(CONFIG)
    return WindowedTransformer(
        CONFIG, reader, kernels, device=device, mode=mode, dtype=torch.float32
    )


def _specs() -> list[SequenceSpec]:
    source, shared = np.random.default_rng(3), np.random.default_rng(4)
    prefix = shared.integers(0, CONFIG.vocab_size, 100)
    return [
        SequenceSpec(
            key=(f"r{index}", 0),
            attempt=1,
            token_ids=np.concatenate(
                [prefix[:kept], source.integers(0, CONFIG.vocab_size, length)]
            ).astype(np.int32),
            sampling=SamplingSpec(temperature=0.0, max_tokens=20, num_logprobs=0),
            seed=index,
        )
        for index, (kept, length) in enumerate(((0, 5), (100, 30), (100, 61), (64, 9), (0, 200)))
    ]


@pytest.mark.parametrize(("mode", "tolerance"), [("reference", 1e-3), ("fast", 0.3)])
def test_answers_are_those_of_the_cpu(mode: Any, tolerance: float) -> None:
    """Logprobs as long as the tokens agree; in float32 all of them do. Prefixes meet, so it replays."""
    wanted = generate(
        _model("cpu", "reference"), replace(ENGINE, device="cpu", mode="reference"), _specs()
    )
    found = generate(_model("cuda", mode), replace(ENGINE, mode=mode), _specs())
    for ours, theirs in zip(found, wanted, strict=True):
        same = [a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
        count = same.index(False) if False in same else len(same)
        assert mode == "fast" or count == len(same)
        for mine, other in zip(ours.logprobs[:count], theirs.logprobs[:count], strict=True):
            assert abs(mine.logprob - other.logprob) < tolerance
