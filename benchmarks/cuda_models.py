"""The models and request lists of the CUDA benchmarks, as peers were timed on them."""

import random
from dataclasses import dataclass

from finback.shared.models.config import ModelConfig


def _qwen3(
    hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, *, tied: bool
) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_model_len=40_960,
        tie_word_embeddings=tied,
        qk_norm=True,
    )


MODELS = {
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how many tokens are wanted."""

    prompt: tuple[int, ...]
    num_tokens: int


def requests(name: str, vocab_size: int) -> list[Request]:
    """One of the workloads latency, decode, nano, prefill and agent; the same list in every run."""
    source = random.Random(0)
    highest = min(vocab_size, 10_000)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(source.randint(10, highest) for _ in range(length))

    if name == "latency":
        return [Request(prompt=prompt(128), num_tokens=256)]
    if name == "decode":
        return [Request(prompt=prompt(128), num_tokens=256) for _ in range(512)]
    if name == "prefill":
        return [Request(prompt=prompt(8192), num_tokens=1) for _ in range(16)]
    if name == "agent":
        prefixes = [prompt(6144) for _ in range(4)]
        return [Request(prompt=prefixes[i % 4] + prompt(128), num_tokens=64) for i in range(32)]
    if name == "nano":
        found = []
        for _ in range(256):
            length = source.randint(100, 1024)
            tokens = prompt(length)
            found.append(Request(prompt=tokens, num_tokens=source.randint(100, 1024)))
        return found
    raise ValueError(f"no workload {name!r}")
