"""A small random network of real layers, without a file."""

from functools import lru_cache

import torch

from finback.kernels import dispatch
from finback.kernels.decode_attention import (
    DecodeWorkspace,
    LaunchShape,
    SharedPrefixes,
    new_shared,
    new_workspace,
)
from finback.shared.models import cpu_stack
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.config import ModelConfig
from finback.shared.models.kv_pool import KVPool
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


def check_shared(
    shared: SharedPrefixes, block_tables: torch.Tensor, context_lens: torch.Tensor, block_size: int
) -> None:
    """Sequences of a chunk begin with the same blocks, all of them before their last token."""
    seen = []
    for num_blocks, *members in shared.chunks.tolist():
        some = [member for member in members if member >= 0]
        seen += some if num_blocks else []
        for member in some if num_blocks else []:
            assert shared.start_blocks[member] == num_blocks
            assert num_blocks * block_size < context_lens[member]
            first, own = block_tables[some[0]], block_tables[member]
            assert torch.equal(first[:num_blocks], own[:num_blocks])
    assert sorted(seen) == shared.start_blocks.nonzero()[:, 0].tolist()


class ResidentTransformer(Transformer):
    """The network with a decoding step of its own, so that the resident runner runs it here."""

    def workspace(self, num_seqs: int, max_context: int) -> DecodeWorkspace:
        """See `ResidentModel`; nothing is kept there."""
        assert max_context > 0
        return new_workspace(num_seqs, 1, 1, 1, LaunchShape(num_programs=1), "cpu")

    def shared_prefixes(self, num_seqs: int) -> SharedPrefixes | None:
        """See `ResidentModel`."""
        return new_shared(num_seqs, 4, 2, 1, "cpu")

    @torch.inference_mode()
    def decode(
        self,
        token_ids: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        kv: KVPool,
        workspace: DecodeWorkspace,
        shared: SharedPrefixes | None = None,
    ) -> torch.Tensor:
        """See `ResidentModel`; what is shared is checked, and read anew."""
        if shared is not None:
            check_shared(shared, block_tables, context_lens, kv.block_size)
        live = torch.nonzero(context_lens > 0)[:, 0]
        hidden = torch.full((token_ids.shape[0], self.config.hidden_size), torch.nan)
        if not live.numel():
            return hidden
        count, positions = live.numel(), context_lens[live] - 1
        blocks = block_tables[live, (positions // kv.block_size).long()]
        batch = ForwardBatch(
            token_ids=token_ids[live],
            positions=positions,
            slot_mapping=blocks * kv.block_size + positions % kv.block_size,
            block_tables=block_tables[live],
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
            context_lens=context_lens[live],
            max_q=1,
            max_context=int(context_lens.max()),
            logit_rows=torch.arange(count),
        )
        hidden[live] = self.forward(batch, kv)
        return hidden

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See `ResidentModel`."""
        out.copy_(self.logits(hidden))


@lru_cache(maxsize=2)
def tiny_resident(mode: str = "deterministic", seed: int = 0) -> CausalLM:
    """The same network for the resident runner, with blocks of any size."""
    torch.set_num_threads(1)
    kernels = dispatch.select_all("cpu", mode)
    reader = RandomReader(CONFIG, seed)
    return ResidentTransformer(
        CONFIG, reader, kernels, device="cpu", mode=mode, dtype=torch.float32
    )
