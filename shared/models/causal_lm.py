"""What the engine knows of a model."""

from typing import Protocol, runtime_checkable

import torch

from finback.shared.kv.state import StateSpec
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.facts import ModelFacts
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.state_slots import StateSlots


class CausalLM(Protocol):
    """A loaded network. Calls come from one thread at a time.

    `default_kv_dtype`: what kv_dtype "auto" means. `weights_bytes`: private memory of the weights.
    `numerics`: names the arithmetic, so that KV of one kind never serves another.
    """

    @property
    def config(self) -> ModelFacts:
        """The model's shape."""
        ...

    device: str
    mode: str
    default_kv_dtype: str
    weights_bytes: int
    numerics: str

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Run the layers, write KV; normed hidden states of `logit_rows`, float32 [R, hidden_size].

        The result may be overwritten by the next call.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, vocab_size]; may be overwritten by the next call."""
        ...

    def new_pool(self, num_blocks: int, block_size: int, kv_dtype: str = "auto") -> KVPool:
        """An empty pool in the layout that this model's kernels want."""
        ...

    def close(self) -> None:
        """Release threads and memory; no call may follow."""
        ...


@runtime_checkable
class StatefulLM(Protocol):
    """What a `CausalLM` with state slots has besides. Every `ForwardBatch` then names its state."""

    def state_spec(self, kv_dtype: str = "auto") -> StateSpec:
        """What a sequence keeps beside its blocks; dtypes as those of a pool of `kv_dtype`."""
        ...

    def new_state(self, num_slots: int, rollback_tokens: int, kv_dtype: str = "auto") -> StateSlots:
        """Empty slots, of whose newest `rollback_tokens` rows any number may be taken back."""
        ...
