"""Workers as rows, and the same as columns for the policy. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

DEFAULT_SPEED: Final = 2_000.0
"""Prompt tokens a second of a worker that has not computed any prompt yet."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """An instance and what it is busy with, this router's unreported placements included.

    `kv_kind`: only equal ones can hand blocks to each other. `salt`: whose blocks fit (`CacheSpec`).
    Tokens and blocks as last reported. `prompt_tokens_per_s`: measured while it computed prompts.
    """

    instance: str
    epoch: int
    is_prefill: bool
    is_decode: bool
    host: str = ""
    kv_kind: str = ""
    salt: str = ""
    block_size: int = 64
    token_bytes: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = DEFAULT_SPEED
    is_stale: bool = False

    @property
    def is_cohosted(self) -> bool:
        return self.is_prefill and self.is_decode


class Fleet:
    """Columns over workers in the order of their names; `set` replaces a row."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers: list[Worker] = sorted(workers, key=lambda w: w.instance)
        self.row_of = {w.instance: row for row, w in enumerate(self.workers)}
        size = len(self.workers)
        self.kinds: Ints = np.zeros(size, dtype=np.int64)
        self.block_size: Ints = np.ones(size, dtype=np.int64)
        self.token_bytes: Floats = np.zeros(size)
        self.num_blocks: Ints = np.zeros(size, dtype=np.int64)
        self.num_free: Ints = np.zeros(size, dtype=np.int64)
        self.num_running: Ints = np.zeros(size, dtype=np.int64)
        self.num_waiting: Ints = np.zeros(size, dtype=np.int64)
        self.waiting_tokens: Floats = np.zeros(size)
        self.speed: Floats = np.ones(size)
        self.is_stale: Bools = np.zeros(size, dtype=np.bool_)
        self.is_prefill: Bools = np.zeros(size, dtype=np.bool_)
        self.is_decode: Bools = np.zeros(size, dtype=np.bool_)
        self._kind_numbers: dict[str, int] = {}
        for worker in self.workers:
            self.set(worker)
        self.is_cohosted: Bools = self.is_prefill & self.is_decode
        self.groups = self._groups()

    def __len__(self) -> int:
        return len(self.workers)

    def set(self, worker: Worker) -> None:
        """Replace the row of an instance that is here; its roles and kind stay as they were."""
        row = self.row_of[worker.instance]
        self.workers[row] = worker
        numbers = self._kind_numbers
        self.kinds[row] = numbers.setdefault(worker.kv_kind, len(numbers))
        self.block_size[row] = worker.block_size
        self.token_bytes[row] = worker.token_bytes
        self.num_blocks[row] = worker.num_blocks
        self.num_free[row] = worker.num_free_blocks
        self.num_running[row] = worker.num_running
        self.num_waiting[row] = worker.num_waiting
        self.waiting_tokens[row] = worker.num_waiting_tokens
        self.speed[row] = worker.prompt_tokens_per_s
        self.is_stale[row] = worker.is_stale
        self.is_prefill[row] = worker.is_prefill
        self.is_decode[row] = worker.is_decode

    def rows(self, instances: Iterable[str]) -> list[int]:
        """Rows of those that are here."""
        return [self.row_of[name] for name in instances if name in self.row_of]

    def _groups(self) -> list[tuple[Ints, Ints]]:
        """(prefill rows, decode rows) of separate workers that can hand blocks to each other."""
        groups = []
        for kind in range(len(self._kind_numbers)):
            alone = (self.kinds == kind) & ~self.is_cohosted
            prefills = np.flatnonzero(alone & self.is_prefill)
            decodes = np.flatnonzero(alone & self.is_decode)
            if len(prefills) and len(decodes):
                groups.append((prefills, decodes))
        return groups


def blocks_needed(worker: Worker, num_prompt_tokens: int, num_choices: int = 1) -> int:
    """Blocks for the prompt and the first tokens of each choice (full blocks are shared)."""
    return math.ceil(num_prompt_tokens / worker.block_size) + num_choices
