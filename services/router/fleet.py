"""Workers as rows, and the same as columns for the policy. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

DEFAULT_SPEED: Final = 2_000.0
"""Prompt tokens a second of a worker that has not computed any prompt yet."""
# A running sequence slows each step a little; a waiting one has to be finished first.
RUNNING_TOKENS: Final = 16
WAITING_TOKENS: Final = 128
# What reading a block takes, measured coarsely on laptops: host memory, files, another process.
HOST_BYTES_PER_S: Final = 2e9
FILE_BYTES_PER_S: Final = 5e8
HAND_OVER_BYTES_PER_S: Final = 1e9
# An instance that has stopped reporting is chosen only if all have.
STALE_S: Final = 1_000_000.0

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


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


@dataclass(frozen=True, slots=True)
class Sides:
    """Rows that may be chosen: `both` alone, or one of each side of a group (neither is empty)."""

    both: Ints
    groups: tuple[tuple[Ints, Ints], ...]
    num_pairs: int

    def without(self, excluded: Ints) -> "Sides":
        """The same without these rows."""
        both = np.setdiff1d(self.both, excluded)
        groups = [(np.setdiff1d(p, excluded), np.setdiff1d(d, excluded)) for p, d in self.groups]
        return Sides.of(both, groups)

    @classmethod
    def of(cls, both: Ints, groups: Iterable[tuple[Ints, Ints]]) -> "Sides":
        """Without the groups that lack a side."""
        whole = tuple((p, d) for p, d in groups if len(p) and len(d))
        return cls(both, whole, len(both) + sum(len(p) * len(d) for p, d in whole))


class Fleet:
    """Columns over workers in the order of their names; `set` replaces a row."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self.workers: list[Worker] = sorted(workers, key=lambda w: w.instance)
        self.row_of = {w.instance: row for row, w in enumerate(self.workers)}
        size = len(self.workers)
        self.kinds: Ints = np.zeros(size, dtype=np.int64)
        self.block_size: Ints = np.ones(size, dtype=np.int64)
        # Seconds a token: to compute it; saved by reaching it in the device pool, there or on the
        # host, there or in files [3, num_workers]; to hand it over.
        self.token_s: Floats = np.ones(size)
        self.saved_s: Floats = np.zeros((3, size))
        self.hand_over_token_s: Floats = np.zeros(size)
        self.num_blocks: Ints = np.zeros(size, dtype=np.int64)
        self.num_free: Ints = np.zeros(size, dtype=np.int64)
        self.num_waiting: Ints = np.zeros(size, dtype=np.int64)
        # In seconds: prompt tokens that wait; what runs and waits; 0, or too much if it is stale.
        self.queue_s: Floats = np.zeros(size)
        self.busy_s: Floats = np.zeros(size)
        self.stale_s: Floats = np.zeros(size)
        self.is_prefill: Bools = np.zeros(size, dtype=np.bool_)
        self.is_decode: Bools = np.zeros(size, dtype=np.bool_)
        self._kind_numbers: dict[str, int] = {}
        # The extremes of two columns; found anew when rows have changed.
        self._is_changed, self._most_waiting, self._least_free = True, 0, 0
        for worker in self.workers:
            self.set(worker)
        self.is_cohosted: Bools = self.is_prefill & self.is_decode
        sizes = {w.block_size for w in self.workers}
        self._least_block_size = min(sizes, default=1)
        # A number where all are alike, which is quicker to multiply with.
        self.block_sizes: Ints | int = sizes.pop() if len(sizes) == 1 else self.block_size
        self._sides = Sides.of(np.flatnonzero(self.is_cohosted), self._groups())
        self.groups = self._sides.groups

    def __len__(self) -> int:
        return len(self.workers)

    def set(self, worker: Worker) -> None:
        """Replace the row of an instance that is here; its roles and kind stay as they were."""
        row = self.row_of[worker.instance]
        self.workers[row] = worker
        self._is_changed = True
        numbers = self._kind_numbers
        self.kinds[row] = numbers.setdefault(worker.kv_kind, len(numbers))
        self.block_size[row] = worker.block_size
        host_s = worker.token_bytes / HOST_BYTES_PER_S
        file_s = worker.token_bytes / FILE_BYTES_PER_S
        # Each reach contains the one before: what the host adds to it is read from there.
        self.saved_s[:, row] = (host_s, file_s - host_s, 1 / worker.prompt_tokens_per_s - file_s)
        self.hand_over_token_s[row] = worker.token_bytes / HAND_OVER_BYTES_PER_S
        self.num_blocks[row] = worker.num_blocks
        self.num_free[row] = worker.num_free_blocks
        self.num_waiting[row] = worker.num_waiting
        speed = worker.prompt_tokens_per_s
        self.token_s[row] = 1 / speed
        stale_s = self.stale_s[row] = STALE_S if worker.is_stale else 0.0
        self.queue_s[row] = worker.num_waiting_tokens / speed
        busy = worker.num_running * RUNNING_TOKENS + worker.num_waiting * WAITING_TOKENS
        self.busy_s[row] = busy / speed + stale_s
        self.is_prefill[row] = worker.is_prefill
        self.is_decode[row] = worker.is_decode

    def add(self, instance: str, *, num_tokens: int = 0, num_choices: int = 0) -> None:
        """Count what was just placed, until the row is set anew."""
        row = self.row_of.get(instance)
        if row is not None:
            self.queue_s[row] += num_tokens * self.token_s[row]
            waiting = self.num_waiting[row] = self.num_waiting[row] + num_choices
            self._most_waiting = max(self._most_waiting, int(waiting))
            self.busy_s[row] += num_choices * WAITING_TOKENS * self.token_s[row]

    def rows(self, instances: Iterable[str]) -> list[int]:
        """Rows of those that are here."""
        return [self.row_of[name] for name in instances if name in self.row_of]

    def sides(self, excluded: Iterable[str] = ()) -> Sides:
        """Who may be chosen."""
        rows = self.rows(excluded) if excluded else []
        return self._sides.without(np.array(rows)) if rows else self._sides

    def is_roomy(self, num_prompt_tokens: int, num_choices: int, max_waiting: int) -> bool:
        """Whether every worker has free blocks for such a prompt, and fewer waiting than that."""
        if not len(self):
            return False
        if self._is_changed:
            self._is_changed = False
            self._most_waiting, self._least_free = (
                int(self.num_waiting.max()),
                int(self.num_free.min()),
            )
        needed = -(-num_prompt_tokens // self._least_block_size) + num_choices
        return self._most_waiting < max_waiting and needed <= self._least_free

    def _groups(self) -> list[tuple[Ints, Ints]]:
        """(prefill rows, decode rows) of separate workers that can hand blocks to each other."""
        groups = []
        for kind in range(len(self._kind_numbers)):
            alone = (self.kinds == kind) & ~self.is_cohosted
            prefills = np.flatnonzero(alone & self.is_prefill)
            decodes = np.flatnonzero(alone & self.is_decode)
            groups.append((prefills, decodes))
        return groups


def blocks_needed(worker: Worker, num_prompt_tokens: int, num_choices: int = 1) -> int:
    """Blocks for the prompt and the first tokens of each choice (full blocks are shared)."""
    return math.ceil(num_prompt_tokens / worker.block_size) + num_choices
