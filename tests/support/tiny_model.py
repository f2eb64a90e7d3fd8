"""A small random network of real layers, without a file."""

from functools import lru_cache

import torch

from finback.kernels import dispatch
from finback.shared.models import cpu_stack
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.config import ModelConfig
from finback.shared.models.transformer import Transformer
from finback.shared.models.weight_names import shapes
from finback.shared.models.weights import QuantisedTensor

# Sizes that the compiled CPU stack takes too (multiples of its tiles).
CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=101,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_model_len=128,
    tie_word_embeddings=False,
    qk_norm=True,
)


class RandomReader:
    """Normal weights, drawn once by name; large enough that texts do not repeat themselves."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tensors = {
            name: torch.ones(shape)
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * (2.0 if "embed" in name else 0.4)
            for name, shape in shapes(config).items()
        }

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """See `WeightReader`."""
        return self._tensors[name].to(dtype)

    def quantised(self, name: str) -> QuantisedTensor | None:
        """See `WeightReader`."""
        return None

    def stored(self, name: str) -> torch.Tensor:
        """See `WeightReader`."""
        return self._tensors[name]

    def optional(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """See `WeightReader`."""
        found = self._tensors.get(name)
        return None if found is None else found.to(dtype)


@lru_cache(maxsize=4)
def tiny_model(mode: str = "deterministic", seed: int = 0) -> CausalLM:
    """The network op by op, with blocks of any size."""
    torch.set_num_threads(1)  # threads cost more than they bring at this size
    kernels = dispatch.select_all("cpu", mode)
    reader = RandomReader(CONFIG, seed)
    return Transformer(CONFIG, reader, kernels, device="cpu", mode=mode, dtype=torch.float32)


@lru_cache(maxsize=2)
def tiny_stack(mode: str = "deterministic", seed: int = 0) -> CausalLM:
    """The same network as one compiled function, where that runs; blocks of 64 tokens."""
    if cpu_stack.unsupported(CONFIG) is not None:
        return tiny_model(mode, seed)
    return cpu_stack.CpuStack(CONFIG, RandomReader(CONFIG, seed), mode=mode, num_threads=1)
