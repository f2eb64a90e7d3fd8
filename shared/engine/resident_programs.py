"""The programs of a decoding step: one row a sequence, all of its state on the device.

A step is two programs, forward and sample, recorded once for every bucket of rows over buffers that
stay where they are (as graphs, on a device that has them). Forward programs come by the contexts that
they are made for, sample programs by what the rows need.
"""

from collections.abc import Callable
from typing import Final, Literal, Protocol, get_args

import torch

from finback.kernels import dispatch
from finback.kernels.decode_attention import SHORT_CONTEXT, DecodeWorkspace, SharedPrefixes
from finback.kernels.gather_step import SlotTensors, StepInputs, new_inputs
from finback.kernels.sample_tokens import SamplingTensors
from finback.shared.engine.device import Device
from finback.shared.engine.sampling_state import SampleKind
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.kv_pool import KVPool

BUCKETS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
MAX_ROWS: Final = BUCKETS[-1]
MAX_SHARED_ROWS: Final = 256

Contexts = Literal["short", "any", "shared"]
"""What a forward program is made for: short contexts only, any, long ones that begin alike."""


def bucket_of(num_rows: int) -> int:
    """The least bucket that holds so many rows."""
    return next(bucket for bucket in BUCKETS if bucket >= num_rows)


class ResidentModel(CausalLM, Protocol):
    """A network whose decoding step launches only."""

    def workspace(self, num_seqs: int, max_context: int) -> DecodeWorkspace:
        """Room for decode attention over so many contexts of up to `max_context` tokens."""
        ...

    def shared_prefixes(self, num_seqs: int) -> SharedPrefixes | None:
        """Room for prefixes that sequences share; None where sharing would save nothing."""
        ...

    def decode(
        self,
        token_ids: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        kv: KVPool,
        workspace: DecodeWorkspace,
        shared: SharedPrefixes | None = None,
    ) -> torch.Tensor:
        """One row a sequence: normed hidden states [S, hidden_size]; context length 0 is padding."""
        ...

    def logits_into(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """float32 [R, vocab_size] logits into `out`."""
        ...


def sampling_tensors(inputs: StepInputs, kind: SampleKind) -> SamplingTensors:
    """Parameters of a step's rows."""
    return SamplingTensors(
        temperature=inputs.temperature,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        min_p=inputs.min_p,
        seed=inputs.seed,
        position=inputs.position,
        is_all_greedy=kind == "greedy",
        has_filters=kind == "filtered",
    )


class DecodePrograms:
    """Forward and sample over shared buffers: write `rows`, run both, read `chosen` and `logits`.

    `rows`: [B, 2] int32, (slot, context length), 0 past the step's rows up to its bucket. `chosen`:
    [B] int32 tokens, -1 where logits were not finite.
    """

    def __init__(
        self,
        model: ResidentModel,
        kv: KVPool,
        slots: SlotTensors,
        device: Device,
        *,
        max_rows: int,
        max_context: int,
    ) -> None:
        self._model, self._kv, self._slots, self._device = model, kv, slots, device
        self._max_context = max_context
        most = bucket_of(min(max_rows, MAX_ROWS))
        self.buckets = tuple(bucket for bucket in BUCKETS if bucket <= most)
        self._inputs = new_inputs(most, slots.block_tables.shape[1], model.device)
        self.rows = torch.zeros((most, 2), dtype=torch.int32, device=model.device)
        self.chosen = torch.zeros(most, dtype=torch.int32, device=model.device)
        self.logits = torch.zeros((most, model.config.vocab_size), device=model.device)
        self._forward: dict[tuple[int, Contexts], Callable[[], None]] = {}
        self.shared = model.shared_prefixes(min(most, MAX_SHARED_ROWS))
        self._sample: dict[tuple[int, SampleKind], Callable[[], None]] = {}

        def kernel(op: str) -> Callable[..., object]:
            return dispatch.select(op, device.name, model.mode).chosen.load()

        self.gather_step, self.commit_step = kernel("gather_step"), kernel("commit_step")
        self.sample_tokens = dispatch.select("sample_tokens", device.name, model.mode).chosen.load()

    def prepare(self) -> int:
        """Record every program, largest first; how many there are."""
        for bucket in reversed(self.buckets):
            for contexts in get_args(Contexts):
                if contexts != "shared" or self.can_share(bucket):
                    self._forward_of(bucket, contexts)
            for kind in get_args(SampleKind):
                self._sample_of(bucket, kind)
        return len(self._forward) + len(self._sample)

    def can_share(self, num_rows: int) -> bool:
        """Is there a program for so many rows of which some begin alike?"""
        return self.shared is not None and 2 <= num_rows <= MAX_SHARED_ROWS

    def forward(self, num_rows: int, max_context: int, *, is_shared: bool = False) -> torch.Tensor:
        """Launch the forward pass over the first rows; their logits, until the next one.

        `is_shared`: `shared` was written, up to the bucket.
        """
        contexts: Contexts = "short" if max_context <= SHORT_CONTEXT else "any"
        self._forward_of(bucket_of(num_rows), "shared" if is_shared else contexts)()
        return self.logits[:num_rows]

    def sample(self, num_rows: int, kind: SampleKind) -> torch.Tensor:
        """Launch sampling behind it; the chosen tokens, until the next one."""
        self._sample_of(bucket_of(num_rows), kind)()
        return self.chosen[:num_rows]

    def _forward_of(self, bucket: int, contexts: Contexts) -> Callable[[], None]:
        key = (bucket, contexts)
        if key not in self._forward:
            self._forward[key] = self._record_forward(bucket, contexts)
        return self._forward[key]

    def _record_forward(self, bucket: int, contexts: Contexts) -> Callable[[], None]:
        is_short = contexts == "short"
        most = min(SHORT_CONTEXT, self._max_context) if is_short else self._max_context
        workspace = self._model.workspace(bucket, most)
        shared = None
        if contexts == "shared" and self.shared is not None:
            shared = SharedPrefixes(
                start_blocks=self.shared.start_blocks[:bucket],
                chunks=self.shared.chunks[: bucket // 2],
                parts=self.shared.parts,
            )
        rows, logits = self.rows[:bucket], self.logits[:bucket]
        inputs = self._inputs.first(bucket)
        tables = inputs.block_tables
        assert tables is not None

        def launch() -> None:
            self.gather_step(self._slots, rows, self._kv.block_size, inputs)
            hidden = self._model.decode(
                inputs.token_ids, inputs.context_lens, tables, self._kv, workspace, shared
            )
            self._model.logits_into(hidden, logits)

        return self._device.record(launch)

    def _sample_of(self, bucket: int, kind: SampleKind) -> Callable[[], None]:
        key = (bucket, kind)
        if key not in self._sample:
            self._sample[key] = self._record_sample(bucket, kind)
        return self._sample[key]

    def _record_sample(self, bucket: int, kind: SampleKind) -> Callable[[], None]:
        rows, logits, chosen = self.rows[:bucket], self.logits[:bucket], self.chosen[:bucket]
        params = sampling_tensors(self._inputs.first(bucket), kind)

        def launch() -> None:
            found = self.sample_tokens(logits, params)
            self.commit_step(rows, found.token_ids, found.is_finite, self._slots.last_token, chosen)

        return self._device.record(launch)
