"""Decoding with nothing on the host: each replay samples a token and feeds it to the next.

The engine's own loop keeps its state on the host and pays for that with a copy in and out every step.
This loop is the measure of what the kernels alone can do, and the shape that a device-resident engine
step takes: forward, head, sampling and the state's advance are one graph.
"""

from dataclasses import dataclass

import torch

from finback.kernels.advance_decode.cuda_triton import advance_decode
from finback.kernels.sample_tokens import SamplingTensors
from finback.kernels.sample_tokens.cuda_triton import sample_tokens
from finback.shared.engine.device import record_graph
from finback.shared.models.cuda_transformer import CudaTransformer
from finback.shared.models.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeState:
    """All [S], on the device: the next step's input, and what was sampled so far.

    `context_lens`: tokens with the one that the next step feeds; 0 = complete, or padding.
    """

    token_ids: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    num_sampled: torch.Tensor
    max_sampled: torch.Tensor
    history: torch.Tensor
    block_tables: torch.Tensor
    seeds: torch.Tensor


def new_state(num_seqs: int, max_tokens: int, width: int, device: str) -> DecodeState:
    """A state of padding only; `width`: blocks a sequence."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeState(
        token_ids=zeros(num_seqs),
        context_lens=zeros(num_seqs),
        positions=zeros(num_seqs, dtype=torch.int64),
        num_sampled=zeros(num_seqs),
        max_sampled=zeros(num_seqs),
        history=zeros(num_seqs, max_tokens),
        block_tables=zeros(num_seqs, width),
        seeds=zeros(num_seqs, dtype=torch.int64),
    )


class DecodeLoop:
    """One batch of sequences over one pool, until all are complete."""

    def __init__(
        self, model: CudaTransformer, kv: KVPool, state: DecodeState, temperature: float
    ) -> None:
        self.state = state
        num_seqs, width = state.block_tables.shape
        self._model, self._kv = model, kv
        self._workspace = model.workspace(num_seqs, width * kv.block_size)
        ones = torch.ones(num_seqs, device=model.device)
        self._params = SamplingTensors(
            temperature=ones * temperature,
            top_k=torch.zeros(num_seqs, dtype=torch.int32, device=model.device),
            top_p=ones,
            min_p=torch.zeros_like(ones),
            seed=state.seeds,
            position=state.positions,
            is_all_greedy=temperature == 0.0,
            has_filters=False,
        )
        self._replay, _ = record_graph(self.launch)

    @torch.inference_mode()
    def launch(self) -> None:
        """One step, launches only."""
        state = self.state
        hidden = self._model.decode(
            state.token_ids, state.context_lens, state.block_tables, self._kv, self._workspace
        )
        sampled = sample_tokens(self._model.logits(hidden), self._params).token_ids
        advance_decode(
            sampled, state.token_ids, state.context_lens, state.positions, state.num_sampled,
            state.max_sampled, state.history,
        )  # fmt: skip

    def step(self) -> None:
        """Replay one step; returns before the device has run it."""
        self._replay()
