"""What sampling needs to know of every slot, and the parameters of a step's rows.

Token counts for penalties live here, per slot, rebuilt from the tokens when a sequence enters; a row
that verifies a draft sees them with the drafts before it laid over.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from finback.kernels import dispatch
from finback.kernels.sample_tokens import SampledTokens, SamplingTensors, greedy
from finback.shared.engine.device import Device
from finback.shared.engine.plan import SlotInit
from finback.shared.engine.slots import SlotTable, StepRows
from finback.shared.wire.messages.generate import TokenLogprob

_FORBIDDEN = float("-inf")

SampleKind = Literal["greedy", "free", "filtered"]
"""What any row of a step needs: nothing, a temperature, or top-k, top-p or min-p too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Of R rows: the chosen token's, and the likeliest."""

    own: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was chosen for R rows, on the host."""

    token_ids: list[int]
    is_finite: list[bool]
    logprobs: Logprobs | None


@dataclass(slots=True, kw_only=True)
class _Counts:
    """Penalty state of a slot: occurrences in the completion, and which tokens the prompt has."""

    output: torch.Tensor
    prompt: torch.Tensor


class SamplingState:
    """Arrays [num_slots]; what few sequences use (counts, biases) only where it is used."""

    def __init__(self, num_slots: int, vocab_size: int, device: Device, mode: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sample = dispatch.select("sample_tokens", device.name, mode).chosen.load()
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int32)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seed = np.zeros(num_slots, dtype=np.int64)
        self._repetition = np.ones(num_slots, dtype=np.float32)
        self._presence = np.zeros(num_slots, dtype=np.float32)
        self._frequency = np.zeros(num_slots, dtype=np.float32)
        self._has_filters = np.zeros(num_slots, dtype=bool)
        self._num_logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._counts: dict[int, _Counts] = {}
        self._biases: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        # slot -> (absolute position below which they are forbidden, stop ids)
        self._min_tokens: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    @property
    def bitmask_bytes(self) -> int:
        """Bytes of a token bitmask."""
        return 4 * self._bitmask_words

    @property
    def _bitmask_words(self) -> int:
        return -(-self._vocab_size // 32)

    def enter(self, slot: int, init: SlotInit) -> None:
        """A sequence takes a slot."""
        sampling = init.spec.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = init.spec.seed
        self._repetition[slot] = sampling.repetition_penalty
        self._presence[slot] = sampling.presence_penalty
        self._frequency[slot] = sampling.frequency_penalty
        self._has_filters[slot] = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        self._num_logprobs[slot] = -1 if sampling.num_logprobs is None else sampling.num_logprobs
        self._enter_counts(slot, init)
        self._enter_biases(slot, init)

    def _enter_counts(self, slot: int, init: SlotInit) -> None:
        self._counts.pop(slot, None)
        sampling = init.spec.sampling
        penalties = (sampling.presence_penalty, sampling.frequency_penalty)
        if sampling.repetition_penalty == 1.0 and penalties == (0.0, 0.0):
            return
        size = self._vocab_size
        output = np.bincount(init.tokens[init.num_prompt :], minlength=size).astype(np.int32)
        prompt = np.zeros(size, dtype=bool)
        prompt[init.tokens[: init.num_prompt]] = True
        self._counts[slot] = _Counts(
            output=self._device.tensor(output), prompt=self._device.tensor(prompt)
        )

    def _enter_biases(self, slot: int, init: SlotInit) -> None:
        self._biases.pop(slot, None)
        self._min_tokens.pop(slot, None)
        sampling = init.spec.sampling
        # An id outside of the vocabulary can neither be chosen nor end anything.
        biases = {i: v for i, v in (sampling.logit_bias or {}).items() if 0 <= i < self._vocab_size}
        if biases:
            self._biases[slot] = (
                np.array(list(biases), dtype=np.int64),
                np.array(list(biases.values()), dtype=np.float32),
            )
        stops = sorted(i for i in init.stops if 0 <= i < self._vocab_size)
        if sampling.min_tokens and stops:
            end = init.num_prompt + sampling.min_tokens
            self._min_tokens[slot] = (end, np.array(stops, dtype=np.int64))

    def count(self, slot: int, token_ids: tuple[int, ...]) -> None:
        """Tokens joined the completion."""
        counts = self._counts.get(slot)
        if counts is not None:
            for token_id in token_ids:
                counts.output[token_id] += 1

    def needs_host(self, slot: int) -> bool:
        """Does a sequence want what only `sample` can do (penalties, biases, logprobs)?"""
        return bool(
            slot in self._counts
            or slot in self._biases
            or slot in self._min_tokens
            or self._num_logprobs[slot] >= 0
        )

    def kind(self, slots: npt.NDArray[np.int64]) -> SampleKind:
        """The least that samples for all these slots, of those that do not need the host."""
        if not self._temperature[slots].any():
            return "greedy"
        return "filtered" if self._has_filters[slots].any() else "free"

    def wants_logprobs(self, slot: int) -> bool:
        """Did this sequence ask for logprobs?"""
        return bool(self._num_logprobs[slot] >= 0)

    def logprob(self, slot: int, logprobs: Logprobs, row: int) -> TokenLogprob:
        """A row's logprobs, with as many of the likeliest as this sequence asked for."""
        count = int(self._num_logprobs[slot])
        return TokenLogprob(
            logprob=logprobs.own[row],
            top_ids=tuple(logprobs.top_ids[row][:count]),
            top_logprobs=tuple(logprobs.top[row][:count]),
        )

    def sample(
        self, logits: torch.Tensor, rows: StepRows, table: SlotTable, masks: dict[int, bytes]
    ) -> Sampled:
        """Choose a token for each of the R sampled rows. `masks`: bitmasks by row."""
        found: SampledTokens = self._sample(logits, self._tensors(rows, table, masks))
        logprobs = None
        if found.logprobs is not None:
            logprobs = Logprobs(
                own=found.logprobs.tolist(),
                top_ids=[] if found.top_ids is None else found.top_ids.tolist(),
                top=[] if found.top_logprobs is None else found.top_logprobs.tolist(),
            )
        return Sampled(
            token_ids=found.token_ids.tolist(),
            is_finite=found.is_finite.tolist(),
            logprobs=logprobs,
        )

    def warm_up(self, logits: torch.Tensor) -> None:
        """Choose from logits that are nobody's, greedily and not."""
        for temperature in (0.0, 1.0):
            params = greedy(logits.shape[0], self._device.name)
            temperatures = torch.full_like(params.temperature, temperature)
            self._sample(
                logits, replace(params, temperature=temperatures, is_all_greedy=not temperature)
            )

    # -- parameters of the rows

    def _tensors(
        self, rows: StepRows, table: SlotTable, masks: dict[int, bytes]
    ) -> SamplingTensors:
        tensor, slots = self._device.tensor, rows.sample_slots
        temperature = self._temperature[slots]
        most_logprobs = int(self._num_logprobs[slots].max())
        penalties = self._penalties(rows, table) if self._counts else {}
        biases = self._bias_tensors(rows) if self._biases or self._min_tokens else {}
        return SamplingTensors(
            temperature=tensor(temperature),
            top_k=tensor(self._top_k[slots]),
            top_p=tensor(self._top_p[slots]),
            min_p=tensor(self._min_p[slots]),
            seed=tensor(self._seed[slots]),
            position=tensor(rows.sample_positions),
            bitmask=self._bitmask(len(slots), masks) if masks else None,
            num_logprobs=None if most_logprobs < 0 else most_logprobs,
            is_all_greedy=not temperature.any(),
            has_filters=bool(self._has_filters[slots].any()),
            **penalties,
            **biases,
        )

    def _penalties(self, rows: StepRows, table: SlotTable) -> dict[str, torch.Tensor]:
        slots = rows.sample_slots.tolist()
        if not any(slot in self._counts for slot in slots):
            return {}
        shape = (len(slots), self._vocab_size)
        outputs = torch.zeros(shape, dtype=torch.int32, device=self._device.name)
        prompts = torch.zeros(shape, dtype=torch.bool, device=self._device.name)
        for row, slot in enumerate(slots):
            counts = self._counts.get(slot)
            if counts is None:
                continue
            outputs[row] = counts.output
            prompts[row] = counts.prompt
            drafts = table.tokens[slot, table.length[slot] : rows.sample_positions[row]]
            for token_id in drafts.tolist():
                outputs[row, token_id] += 1
        tensor, index = self._device.tensor, rows.sample_slots
        return {
            "output_counts": outputs,
            "prompt_mask": prompts,
            "repetition_penalty": tensor(self._repetition[index]),
            "presence_penalty": tensor(self._presence[index]),
            "frequency_penalty": tensor(self._frequency[index]),
        }

    def _bias_tensors(self, rows: StepRows) -> dict[str, torch.Tensor]:
        where, ids, values = [], [], []
        for row, slot in enumerate(rows.sample_slots.tolist()):
            bias = self._biases.get(slot)
            if bias is not None:
                where.append(np.full(bias[0].size, row))
                ids.append(bias[0])
                values.append(bias[1])
            end, stops = self._min_tokens.get(slot, (0, None))
            if stops is not None and rows.sample_positions[row] < end:
                where.append(np.full(stops.size, row))
                ids.append(stops)
                values.append(np.full(stops.size, _FORBIDDEN, dtype=np.float32))
        if not where:
            return {}
        tensor = self._device.tensor
        return {
            "bias_rows": tensor(np.concatenate(where)),
            "bias_ids": tensor(np.concatenate(ids)),
            "bias_values": tensor(np.concatenate(values)),
        }

    def _bitmask(self, num_rows: int, masks: dict[int, bytes]) -> torch.Tensor:
        words = np.full((num_rows, self._bitmask_words), -1, dtype=np.int32)
        for row, bitmask in masks.items():
            words[row] = np.frombuffer(bitmask, dtype="<i4")
        return self._device.tensor(words)
