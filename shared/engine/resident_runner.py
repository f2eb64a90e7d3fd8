"""Executes plans on a device that computes by itself: launch step t + 1 while t runs.

What a step hands to the next one (the sampled token) never leaves the device; the host knows every
length without it, since a step without drafts adds one token. Single rows that are sampled from go
through recorded programs, chunks of prompts through launches of their own behind them. Results come
by event, and the books of the host (`slots`) follow one step or two behind.

Steps that need more of the host wait for it: a draft at hand, a grammar's mask, penalties, biases,
logprobs. They are computed as `Runner` does, after everything launched before them is known.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, cast

import numpy as np
import torch

from finback.kernels import dispatch
from finback.kernels.gather_step import new_inputs
from finback.shared.clock import monotonic_s
from finback.shared.engine.arrival import StepGate
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.device import Device
from finback.shared.engine.device_thread import Pending
from finback.shared.engine.launched_step import DeviceTime, LaunchedPart, LaunchedStep
from finback.shared.engine.plan import PlanItem, StepPlan, StepResult
from finback.shared.engine.prefix_groups import PrefixGroups, find_groups
from finback.shared.engine.resident_programs import (
    MAX_ROWS,
    DecodePrograms,
    ResidentModel,
    bucket_of,
    sampling_tensors,
)
from finback.shared.engine.resident_state import ResidentState
from finback.shared.engine.runner import Runner
from finback.shared.engine.sizing import EngineSizes
from finback.shared.engine.slots import Int64, StepRows
from finback.shared.errors import ConfigError
from finback.shared.models.causal_lm import StatefulLM

if TYPE_CHECKING:
    from finback.shared.models.causal_lm import CausalLM

_DEPTH: Final = 3
_CHUNK_ROWS: Final = 64  # enough for the attention kernel of long chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staging:
    """Pinned memory of one step: rows [n, 2] on their way in, tokens [n] on their way out.

    `starts`, `chunks`: those of `SharedPrefixes`. A step has at most one group of rows that is small
    enough for them.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    starts: torch.Tensor
    chunks: torch.Tensor | None


class ResidentRunner(Runner):
    """As `Runner`; `execute` returns as soon as a step is launched."""

    depth: ClassVar[int] = _DEPTH
    launches: ClassVar[bool] = True

    def __init__(
        self, model: ResidentModel, sizes: EngineSizes, config: EngineConfig, device: Device
    ) -> None:
        super().__init__(model, sizes, config, device)
        num_slots, max_len = config.max_num_seqs, sizes.memory.max_model_len
        self._block_size = config.block_size
        width = self.slots.block_tables.shape[1]
        self._state = ResidentState(num_slots, width, model.device)
        self._programs = DecodePrograms(
            model, self._pool, self._state.slots, device, max_rows=num_slots, max_context=max_len
        )
        self._scatter = dispatch.select("scatter_words", device.name, model.mode).chosen.load()
        # Tokens whose KV is in the pool once all that is launched has run.
        self._launched = np.zeros(num_slots, dtype=np.int64)
        # Rises when a slot changes hands: what was launched for its last owner is not for the books.
        self._entry = np.zeros(num_slots, dtype=np.int64)
        self._host_slots: set[int] = set()
        self._books = threading.Lock()
        self._on_way: deque[LaunchedStep] = deque()
        self._time = DeviceTime()
        size = num_slots + MAX_ROWS
        self._staging = deque(self._new_staging(size) for _ in range(_DEPTH + 1))
        self._grouped_for: tuple[bytes, bytes] | None = None
        self._groups: PrefixGroups | None = None

    def _new_staging(self, size: int) -> _Staging:
        shared, pinned = self._programs.shared, self._device.pinned
        return _Staging(
            rows=pinned(size, 2, dtype=torch.int32),
            tokens=pinned(size, dtype=torch.int32),
            starts=pinned(size, dtype=torch.int32),
            chunks=None if shared is None else pinned(*shared.chunks.shape, dtype=torch.int32),
        )

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record all programs, and run once what chunks of prompts need."""
        for num_rows in (1, 2, min(_CHUNK_ROWS, self._block_size)):
            super().warm_up(num_rows)
        self._scatter(self._state.words, self._device.tensor(np.zeros((1, 2), dtype=np.int32)))
        nobody = torch.zeros((1, 2), dtype=torch.int32, device=self._model.device)
        inputs = new_inputs(1, 0, self._model.device)
        self._programs.gather_step(self._state.slots, nobody, self._block_size, inputs)
        self._programs.prepare()
        self._device.wait()

    @torch.inference_mode()
    def warm_up(self, num_rows: int) -> float:
        """See `Runner`: a step of rows that are nobody's."""
        self._programs.rows.zero_()
        self._device.wait()
        started = monotonic_s()
        self._programs.forward(min(num_rows, self._programs.buckets[-1]), 1)
        self._programs.sample(min(num_rows, self._programs.buckets[-1]), "free")
        self._device.wait()
        return 1e3 * (monotonic_s() - started)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult | Pending[StepResult]:
        """See `Runner`."""
        started = monotonic_s()
        with self._books:
            for item in plan.items:
                if item.init is not None or item.new_block_ids:
                    self._enter(item)
        if any(self._waits_for_host(item) for item in plan.items):
            return self._execute_synced(plan, started)
        while len(self._on_way) > _DEPTH or (self._on_way and self._on_way[0].is_known):
            self._on_way.popleft().wait()
        with self._device.no_waiting():
            self._update()
            step = self._launch(plan, started)
        self._on_way.append(step)
        return step

    def _enter(self, item: PlanItem) -> None:
        slot, init = item.slot, item.init
        if init is not None:
            self._entry[slot] += 1
            self._launched[slot] = init.num_computed
            self._sampling.enter(slot, init)
            self._host_slots.discard(slot)
            if self._sampling.needs_host(slot):
                self._host_slots.add(slot)
            self._state.note_sampling(slot, init.spec.sampling, init.spec.seed)
        self.slots.enter(item)
        if item.new_block_ids:
            first = self.slots.num_blocks(slot) - len(item.new_block_ids)
            self._state.note_blocks(slot, first, item.new_block_ids)

    def _waits_for_host(self, item: PlanItem) -> bool:
        if item.max_drafts and self.slots.has_offer(item.slot):
            return True
        has_grammar = item.sequence.spec.has_grammar
        return item.is_sampled and (has_grammar or item.slot in self._host_slots)

    def _update(self) -> None:
        """Tell the device of new sequences and blocks."""
        updates = self._state.take()
        if updates is not None:
            self._scatter(self._state.words, self._device.tensor(updates))

    # -- steps that are only launched

    def _launch(self, plan: StepPlan, started: float) -> LaunchedStep:
        single: list[int] = []
        chunks: list[int] = []
        for index, item in enumerate(plan.items):
            (single if item.is_sampled and item.num_rows == 1 else chunks).append(index)
        staging = self._staging[0]
        self._staging.rotate(-1)
        parts, cursor = [], 0
        for start in range(0, len(single), MAX_ROWS):
            some = single[start : start + MAX_ROWS]
            parts.append(self._launch_single(plan, some, staging, cursor))
            cursor += bucket_of(len(some))
        if chunks:
            parts.append(self._launch_chunks(plan, chunks, staging, cursor))
        num_rows = sum(int(part.num_rows.sum()) for part in parts)
        return LaunchedStep(
            plan=plan,
            parts=tuple(parts),
            num_rows=num_rows,
            started_s=started,
            time=self._time,
            wait=self._device.mark(),
            keep=self._keep,
        )

    def _launch_single(
        self, plan: StepPlan, indexes: list[int], staging: _Staging, cursor: int
    ) -> LaunchedPart:
        """One row each, through the programs."""
        count = len(indexes)
        items = plan.items
        slots = np.fromiter((items[i].slot for i in indexes), dtype=np.int64, count=count)
        for index in indexes:
            if items[index].is_chunk:  # its token is known here, and not from a step before
                slot = items[index].slot
                known = int(self.slots.tokens[slot, self._launched[slot]])
                self._state.note_token(slot, known)
        self._update()
        self._launched[slots] += 1
        contexts = self._launched[slots]
        end = cursor + bucket_of(count)
        host = staging.rows[cursor:end]
        view = host.numpy()
        view[:count, 0], view[:count, 1] = slots, contexts
        view[count:] = 0
        programs = self._programs
        programs.rows[: end - cursor].copy_(host, non_blocking=True)
        is_shared = self._stage_shared(slots, contexts, staging)
        programs.forward(count, int(contexts.max()), is_shared=is_shared)
        chosen = programs.sample(count, self._sampling.kind(slots))
        tokens = staging.tokens[cursor : cursor + count]
        tokens.copy_(chosen, non_blocking=True)
        return LaunchedPart(
            indexes=indexes,
            slots=slots,
            entries=self._entry[slots],
            num_rows=np.ones(count, dtype=np.int64),
            is_sampled=np.ones(count, dtype=bool),
            tokens=tokens,
        )

    def _stage_shared(self, slots: Int64, contexts: Int64, staging: _Staging) -> bool:
        """Tell the device which of these sequences begin alike; False if too few do."""
        shared, count = self._programs.shared, slots.size
        if shared is None or staging.chunks is None or not self._programs.can_share(count):
            return False
        key = (slots.tobytes(), self._entry[slots].tobytes())
        if key != self._grouped_for:
            # Shared blocks are whole, so tokens that are added later do not change them.
            num_members = staging.chunks.shape[1] - 1
            tables = self.slots.block_tables[slots]
            self._groups = find_groups(tables, contexts, self._block_size, num_members)
            self._grouped_for = key
        if self._groups is None:
            return False
        bucket = bucket_of(count)
        starts, chunks = staging.starts.numpy(), staging.chunks.numpy()
        starts[:count], starts[count:bucket] = self._groups.start_blocks, 0
        chunks[: bucket // 2, 0], chunks[: bucket // 2, 1:] = 0, -1
        for index, (num_blocks, members) in enumerate(self._groups.chunks):
            chunks[index, 0] = num_blocks
            chunks[index, 1 : 1 + len(members)] = members
        shared.start_blocks[:bucket].copy_(staging.starts[:bucket], non_blocking=True)
        shared.chunks[: bucket // 2].copy_(staging.chunks[: bucket // 2], non_blocking=True)
        return True

    def _launch_chunks(
        self, plan: StepPlan, indexes: list[int], staging: _Staging, cursor: int
    ) -> LaunchedPart:
        """Rows of prompts, and those that decode only once their prompt is computed."""
        items = [plan.items[i] for i in indexes]
        slots = np.array([item.slot for item in items], dtype=np.int64)
        num_rows = np.array([item.num_rows for item in items], dtype=np.int64)
        sampled = [item.is_sampled for item in items]
        with self._books:
            rows = self.slots.flatten(
                indexes, slots, num_rows, [0] * len(items), sampled, self._launched[slots]
            )
        self._launched[slots] += num_rows
        hidden = self._model.forward(self._batch(rows), self._pool)
        tokens = staging.tokens[cursor : cursor + sum(sampled)]
        if any(sampled):
            tokens.copy_(self._sample_chunks(rows, hidden), non_blocking=True)
        return LaunchedPart(
            indexes=indexes,
            slots=slots,
            entries=self._entry[slots],
            num_rows=num_rows,
            is_sampled=np.array(sampled),
            tokens=tokens,
        )

    def _sample_chunks(self, rows: StepRows, hidden: torch.Tensor) -> torch.Tensor:
        pairs = np.stack((rows.sample_slots, rows.sample_positions), axis=1).astype(np.int32)
        wanted = self._device.tensor(pairs)
        count, device = pairs.shape[0], self._model.device
        inputs = new_inputs(count, 0, device)
        programs, slots = self._programs, self._state.slots
        programs.gather_step(slots, wanted, self._block_size, inputs)
        params = sampling_tensors(inputs, self._sampling.kind(rows.sample_slots))
        found = programs.sample_tokens(self._model.logits(hidden), params)
        chosen = torch.empty(count, dtype=torch.int32, device=device)
        programs.commit_step(wanted, found.token_ids, found.is_finite, slots.last_token, chosen)
        return chosen

    def _keep(self, part: LaunchedPart, token_ids: Int64) -> None:
        """A launched part is known: take it into the books, as far as its slots are still its own.

        `token_ids`: -1 where nothing was sampled.
        """
        with self._books:
            mine = self._entry[part.slots] == part.entries
            self.slots.accept_many(part.slots[mine], part.num_rows[mine], token_ids[mine])

    # -- steps that wait for the host

    def _execute_synced(self, plan: StepPlan, started: float) -> StepResult:
        while self._on_way:
            self._on_way.popleft().wait()
        self._update()
        result = self._execute_now(plan, started)
        for item in plan.items:
            slot = item.slot
            self._launched[slot] = self.slots.computed[slot]
            if item.is_sampled:
                self._state.note_token(slot, int(self.slots.tokens[slot, self._launched[slot]]))
        return result

    @property
    def waits_for_layers(self) -> bool:
        """Launched steps run without the host: nobody would wait."""
        return False

    def _logits(self, rows: StepRows, gate: StepGate | None = None) -> torch.Tensor:
        """Through the programs where every sequence has one row, which is sampled from."""
        count = rows.slots.size
        if not count == rows.token_ids.size == rows.logit_rows.size <= MAX_ROWS:
            return super()._logits(rows, gate)
        for slot, token_id in zip(rows.slots.tolist(), rows.token_ids.tolist(), strict=True):
            self._state.note_token(slot, token_id)
        self._update()
        pairs = np.zeros((bucket_of(count), 2), dtype=np.int32)
        pairs[:count, 0], pairs[:count, 1] = rows.slots, rows.context_lens
        self._programs.rows[: pairs.shape[0]].copy_(self._device.tensor(pairs))
        return self._programs.forward(count, int(rows.context_lens.max()))


def new_runner(
    model: "CausalLM", sizes: EngineSizes, config: EngineConfig, device: Device
) -> Runner:
    """The runner for a network: resident, if its decoding step launches only."""
    if hasattr(model, "decode"):
        if isinstance(model, StatefulLM):
            raise ConfigError("a model with state slots cannot decode by recorded programs yet")
        return ResidentRunner(cast(ResidentModel, model), sizes, config, device)
    return Runner(model, sizes, config, device)
