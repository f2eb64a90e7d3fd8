"""A tiny random model in a GGUF file, and what to ask it, for tests of the offline API."""

from pathlib import Path
from typing import Any

import numpy as np

from finback.shared.offline.llm import LLM
from finback.shared.offline.outputs import Completion
from finback.shared.offline.params import SamplingParams
from support.tiny_folders import ascii_vocabulary, save_gguf, tiny_hf_model

VOCAB_SIZE = 96


def save_tiny(folder: Path) -> Path:
    """The model's file: sizes that the compiled CPU stack takes, a vocabulary of characters."""
    model = tiny_hf_model("qwen3", intermediate_size=128, vocab_size=VOCAB_SIZE)
    return save_gguf(model, folder / "tiny.gguf", "F32", ascii_vocabulary())


def tiny_llm(path: Path, **options: Any) -> LLM:
    """The model on one thread, with a small pool."""
    return LLM(path, **{"num_threads": 1, "kv_pool_bytes": 2**21, "max_num_seqs": 16, **options})


def token_prompts(
    count: int, *, low: int, high: int, num_shared: int, lengths: tuple[int, ...]
) -> list[list[int]]:
    """Prompts with a common beginning; every other one ends in a loop."""
    rng = np.random.default_rng(11)
    shared = rng.integers(low, high, num_shared).tolist()
    prompts = []
    for index in range(count):
        own = rng.integers(low, high, lengths[index % len(lengths)]).tolist()
        prompts.append([*shared, *own, *(own[-4:] * 3 if index % 2 else ())])
    return prompts


def mixed_params(count: int, max_tokens: int) -> list[SamplingParams]:
    """Greedy, and sampled with seeds and filters, with logprobs.

    Every fourth answer is of three tokens only: it repeats itself, which drafts live on.
    """
    return [
        SamplingParams(
            temperature=0.0 if index % 3 == 0 else 0.9,
            top_p=0.9 if index % 3 == 1 else 1.0,
            frequency_penalty=0.4 if index % 5 == 4 else 0.0,
            logit_bias=dict.fromkeys((50, 51, 52), 60.0) if index % 4 == 3 else None,
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=3,
        )
        for index in range(count)
    ]


def told(completions: list[Completion]) -> list[object]:
    """What must be equal to the last bit."""
    return [(c.index, c.token_ids, c.logprobs, c.finish_reason, c.text) for c in completions]
