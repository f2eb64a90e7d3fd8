"""A trained model through the engine on an NVIDIA device (`FINBACK_TEST_GGUF` names its file)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finback.shared.engine.config import EngineConfig
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.batch import ForwardBatch
from finback.shared.wire.messages.generate import SamplingSpec
from support.engine_driver import Completion, generate

GGUF = os.environ.get("FINBACK_TEST_GGUF", "")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(not GGUF, reason="FINBACK_TEST_GGUF names no file"),
]
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "To make bread you need flour, water, salt and yeast. First",
    "Water boils at",
)
SETTINGS = EngineConfig(
    num_blocks=200, max_num_seqs=8, max_num_batched_tokens=64, device="cuda", mode="fast"
)
# bfloat16 against float32 moves a logit of this model by 0.4 at most (docs/LOG.md).
TOLERANCE = 0.8


def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 logits of all positions."""
    count, width = len(tokens), -(-len(tokens) // 64)

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    batch = ForwardBatch(
        token_ids=tensor(tokens), positions=tensor(range(count)), slot_mapping=tensor(range(count)),
        block_tables=tensor([list(range(width))]), cu_seqlens=tensor([0, count]),
        context_lens=tensor([count]), max_q=count, max_context=count,
        logit_rows=torch.arange(count, device="cuda"),
    )  # fmt: skip
    found: torch.Tensor = model.logits(model.forward(batch, model.new_pool(width, 64)))
    return found


def test_greedy_text_is_that_of_float32_up_to_near_ties(
    record_property: Any,
) -> None:
    from finback.shared.codec.load import load_tokenizer
    from finback.shared.models.loader import load_model
    from finback.shared.models.source import open_source

    source = open_source(str(Path(GGUF)))
    tokenizer = load_tokenizer(source.text)
    truth = load_model(source, "cuda", "reference", weights_dtype="f32")
    model = load_model(source, "cuda", "fast")
    specs = [
        SequenceSpec(
            key=(f"r{index}", 0),
            attempt=1,
            token_ids=np.array(tokenizer.encode(text), dtype=np.int32),
            sampling=SamplingSpec(temperature=0.0, max_tokens=60, ignore_eos=True),
            seed=index,
        )
        for index, text in enumerate(TEXTS)
    ]
    alone = [generate(model, SETTINGS, [spec])[0] for spec in specs]
    ways: dict[str, list[Completion]] = {
        "alone": alone,
        "batched": generate(model, SETTINGS, specs),
        "preempted": generate(model, replace(SETTINGS, num_blocks=5, max_model_len=256), specs),
        "chunks of 8": generate(model, replace(SETTINGS, max_num_batched_tokens=8), specs),
    }
    most = 0.0
    for way, completions in ways.items():
        for spec, completion in zip(specs, completions, strict=True):
            prompt = spec.token_ids.tolist()
            rows = logits_of(truth, prompt + completion.tokens)[len(prompt) - 1 : -1]
            chosen = torch.tensor(completion.tokens, device="cuda")
            gap = rows.max(1).values - rows.gather(1, chosen[:, None])[:, 0]
            assert float(gap.max()) < TOLERANCE, (way, spec.key, gap.max())
            most = max(most, float(gap.max()))
    record_property("largest gap", most)
    print(f"largest gap {most:.3f};", repr(tokenizer.decode(alone[0].tokens)[:80]))  # noqa: T201 - pytest shows it with -s
