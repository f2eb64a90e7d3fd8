"""A V4 folder as a model of the engine: block KV in pages, state in slots."""

from pathlib import Path

import torch

from finback.shared.errors import ConfigError
from finback.shared.kv.state import StateSpec
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.deepseek_v4.batch import V4Batch
from finback.shared.models.deepseek_v4.checkpoint import V4Checkpoint
from finback.shared.models.deepseek_v4.config import BLOCK_TOKENS, V4Config
from finback.shared.models.deepseek_v4.load import WeightLoader
from finback.shared.models.deepseek_v4.network import V4Network
from finback.shared.models.deepseek_v4.pool import V4Pool
from finback.shared.models.deepseek_v4.single_rows import single_rows
from finback.shared.models.deepseek_v4.state import layer_memories
from finback.shared.models.deepseek_v4.state_parts import state_spec
from finback.shared.models.kv_pool import KVPool
from finback.shared.models.state_slots import StateSlots

_KV_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class V4Model:
    """A `CausalLM` and `StatefulLM` over the network in plain torch.

    In deterministic mode every row goes through the network alone, in the order of its position: its
    bits depend on its context, not on chunks and company. That is slow, and exact.
    """

    def __init__(
        self,
        folder: Path,
        config: V4Config,
        *,
        device: str,
        mode: str,
        dtype: torch.dtype,
        keeps_stored: bool = False,
    ) -> None:
        """Read the weights, dequantised to `dtype` now or (`keeps_stored`) whenever they are used."""
        if device != "cpu":
            raise ConfigError(
                f"{folder}: {config.architecture} models run on the cpu, not {device}"
            )
        self._config = config
        self.device = device
        self.mode = mode
        self.default_kv_dtype = _KV_DTYPES[dtype]
        self.numerics = f"v4-{mode}-{self.default_kv_dtype}"
        checkpoint = V4Checkpoint(folder, config)
        weights = WeightLoader(checkpoint, config, dtype, keeps_stored=keeps_stored).load()
        self._network = V4Network(config, weights, device)
        self.weights_bytes = weights.num_bytes

    @property
    def config(self) -> V4Config:
        """The model's shape."""
        return self._config

    def new_pool(
        self, num_blocks: int, block_size: int = BLOCK_TOKENS, kv_dtype: str = "auto"
    ) -> V4Pool:
        """See `CausalLM`; the block size is the model's own."""
        self._config.block_tokens(block_size)
        return V4Pool(
            self._config,
            num_blocks=num_blocks,
            kv_dtype=self._kv_dtype(kv_dtype),
            device=self.device,
        )

    def state_spec(self, kv_dtype: str = "auto") -> StateSpec:
        """See `StatefulLM`."""
        return state_spec(self._config, self._kv_dtype(kv_dtype))

    def new_state(self, num_slots: int, rollback_tokens: int, kv_dtype: str = "auto") -> StateSlots:
        """See `StatefulLM`."""
        return StateSlots(
            self.state_spec(kv_dtype),
            num_slots=num_slots,
            rollback_tokens=rollback_tokens,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """See `CausalLM`."""
        if batch.state is None or not isinstance(kv, V4Pool):
            raise ValueError(
                "a V4 model needs its own pool, and the state of the batch's sequences"
            )
        layers = layer_memories(self._config, kv, batch.state.pool)
        step = _step(batch)
        if self.mode != "deterministic" or batch.num_rows == 1:
            return self._network.forward(step, layers).float()
        hidden = torch.empty((batch.num_rows, self._config.hidden_size))
        for row, single in single_rows(step):
            hidden[row] = self._network.forward(single, layers)[0].float()
        return hidden[batch.logit_rows]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        if self.mode != "deterministic":
            return self._network.logits(hidden)
        rows = [self._network.logits(row) for row in hidden[:, None]]
        return torch.cat(rows) if rows else self._network.logits(hidden)

    def close(self) -> None:
        """See `CausalLM`: there is nothing to release."""

    def _kv_dtype(self, asked: str) -> str:
        return self.default_kv_dtype if asked == "auto" else asked


def _step(batch: ForwardBatch) -> V4Batch:
    """The engine's rows as the network wants them."""
    state = batch.state
    if state is None:
        raise ValueError("the batch names no state")
    edges = batch.cu_seqlens.long()
    starts = batch.positions.long()[edges[:-1]]
    lengths = edges[1:] - edges[:-1]
    entries_from = starts
    if state.stored_rows is not None:
        # A sequence's rows from its first stored one on are stored; before it they are a replay.
        is_stored = torch.zeros(batch.num_rows, dtype=torch.bool)
        is_stored[state.stored_rows] = True
        counts = torch.segment_reduce(is_stored.float(), "sum", lengths=lengths).long()
        entries_from = starts + lengths - counts
    return V4Batch(
        token_ids=batch.token_ids.long(),
        starts=starts,
        lengths=lengths,
        slots=state.slots,
        block_tables=batch.block_tables,
        logit_rows=batch.logit_rows,
        replay_starts=state.floors,
        entries_from=entries_from,
    )
