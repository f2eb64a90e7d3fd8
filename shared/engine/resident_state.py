"""What the device knows of every slot, and how the host tells it of changes.

All tables lie in one array of words, so that whatever a plan brings (new sequences, new blocks) is one
copy and one kernel. `last_token` is the exception in who writes it: the device itself, every step.
"""

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from finback.kernels.gather_step import SlotTensors
from finback.shared.wire.messages.generate import SamplingSpec

Words = npt.NDArray[np.int32]
_ALIGNMENT: Final = 64  # words; kernels want tables at round addresses


class ResidentState:
    """State of `num_slots` slots, of up to `width` blocks each. `note_*` collect; `take` empties."""

    def __init__(self, num_slots: int, width: int, device: str) -> None:
        self._width = width
        sizes = {
            "seed": 2 * num_slots,
            "last_token": num_slots,
            "temperature": num_slots,
            "top_k": num_slots,
            "top_p": num_slots,
            "min_p": num_slots,
            "block_tables": num_slots * width,
        }
        self._start: dict[str, int] = {}
        end = 0
        for name, size in sizes.items():
            self._start[name] = end
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.words = torch.zeros(end, dtype=torch.int32, device=device)

        def view(name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            start = self._start[name]
            return self.words[start : start + sizes[name]].view(dtype)

        self.slots = SlotTensors(
            last_token=view("last_token"),
            seed=view("seed", torch.int64),
            temperature=view("temperature", torch.float32),
            top_k=view("top_k"),
            top_p=view("top_p", torch.float32),
            min_p=view("min_p", torch.float32),
            block_tables=view("block_tables").view(num_slots, width),
        )
        self._indexes: list[int] = []
        self._values: list[int] = []
        self._runs: list[tuple[int, Words]] = []

    def note_sampling(self, slot: int, sampling: SamplingSpec, seed: int) -> None:
        """A sequence's parameters."""
        floats = np.array([sampling.temperature, sampling.top_p, sampling.min_p], dtype=np.float32)
        temperature, top_p, min_p = floats.view(np.int32).tolist()
        low, high = np.array([seed], dtype=np.int64).view(np.int32).tolist()
        start = self._start
        self._indexes += (
            start["temperature"] + slot,
            start["top_p"] + slot,
            start["min_p"] + slot,
            start["top_k"] + slot,
            start["seed"] + 2 * slot,
            start["seed"] + 2 * slot + 1,
        )
        self._values += (temperature, top_p, min_p, sampling.top_k, low, high)

    def note_token(self, slot: int, token_id: int) -> None:
        """The host knows the token that this slot feeds next."""
        self._indexes.append(self._start["last_token"] + slot)
        self._values.append(token_id)

    def note_blocks(self, slot: int, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks of a slot's table from entry `first` on."""
        start = self._start["block_tables"] + slot * self._width + first
        if len(block_ids) == 1:
            self._indexes.append(start)
            self._values.append(block_ids[0])
        else:
            self._runs.append((start, np.array(block_ids, dtype=np.int32)))

    def take(self) -> Words | None:
        """Everything noted since the last call as [n, 2] (index, value), or None."""
        if not self._indexes and not self._runs:
            return None
        indexes = [np.array(self._indexes, dtype=np.int64)]
        values = [np.array(self._values, dtype=np.int64).astype(np.int32)]
        for start, run in self._runs:
            indexes.append(np.arange(start, start + run.size))
            values.append(run)
        self._indexes, self._values, self._runs = [], [], []
        pairs = (np.concatenate(indexes).astype(np.int32), np.concatenate(values))
        return np.stack(pairs, axis=1)
