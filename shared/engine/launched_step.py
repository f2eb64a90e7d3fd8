"""A step on its way: what was launched, and its result once the device has run it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from finback.shared.clock import monotonic_s
from finback.shared.engine.device_thread import Pending
from finback.shared.engine.plan import ItemResult, StepPlan, StepResult
from finback.shared.engine.slots import Int64

NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPart:
    """Some items of a plan, launched together.

    `indexes`: [S] where they are in the plan; `slots`, `entries` (how often each slot had changed
    hands), `num_rows`, `is_sampled`: [S]. `tokens`: [number sampled] int32 on the host, -1 where
    logits were not finite; written by the device.
    """

    indexes: list[int]
    slots: Int64
    entries: Int64
    num_rows: Int64
    is_sampled: npt.NDArray[np.bool_]
    tokens: torch.Tensor


@dataclass(slots=True)
class DeviceTime:
    """When the device ended its last known step: while steps overlap, the next began then."""

    last_end_s: float = 0.0


class LaunchedStep(Pending[StepResult]):
    """`wait` may be called by the thread that launches and the one that collects, in launch order.

    `wait` (of the constructor) returns when the device is done; `keep` takes a part into the books.
    """

    def __init__(
        self,
        *,
        plan: StepPlan,
        parts: tuple[LaunchedPart, ...],
        num_rows: int,
        started_s: float,
        time: DeviceTime,
        wait: Callable[[], None],
        keep: Callable[[LaunchedPart, Int64], None],
    ) -> None:
        self._plan, self._parts, self._num_rows = plan, parts, num_rows
        self._started_s, self._time = started_s, time
        self._wait, self._keep = wait, keep
        self._lock = threading.Lock()
        self._result: StepResult | None = None

    @property
    def is_known(self) -> bool:
        """Is the result in the books?"""
        return self._result is not None

    def wait(self) -> StepResult:
        """See `Pending`."""
        with self._lock:
            if self._result is None:
                self._wait()
                self._result = self._collect()
            return self._result

    def _collect(self) -> StepResult:
        items: list[ItemResult] = [ItemResult(num_computed=0)] * len(self._plan.items)
        for part in self._parts:
            token_ids = np.full(len(part.indexes), -1, dtype=np.int64)
            token_ids[part.is_sampled] = part.tokens.numpy()
            self._keep(part, token_ids)
            _fill(items, part, token_ids.tolist())
        end_s = monotonic_s()
        began_s = max(self._started_s, self._time.last_end_s)
        self._time.last_end_s = end_s
        return StepResult(
            step=self._plan.step,
            items=tuple(items),
            num_rows=self._num_rows,
            started_s=began_s,
            duration_ms=1e3 * (end_s - began_s),
        )


def _fill(items: list[ItemResult], part: LaunchedPart, token_ids: list[int]) -> None:
    sampled = part.is_sampled.tolist()
    for row, (index, num_rows) in enumerate(zip(part.indexes, part.num_rows.tolist(), strict=True)):
        token_id = token_ids[row]
        if token_id >= 0:
            items[index] = ItemResult(num_computed=num_rows, token_ids=(token_id,))
        elif sampled[row]:
            items[index] = ItemResult(num_computed=0, error=NOT_FINITE)
        else:
            items[index] = ItemResult(num_computed=num_rows)
