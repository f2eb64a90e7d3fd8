"""Where the time of the compiled stack goes: cycles between the ends of its phases, as thread 0 saw them."""

import time
from typing import Final

import numpy as np
import numpy.typing as npt

from finback.kernels.decoder_stack.layout import TASK_HEAD, TASK_WIDE

_EXACT: Final = ("norm", "qkv", "rotate, store", "attention", "o", "norm 2", "gate, up", "down")
_WIDE: Final = (*_EXACT[:3], "unpack kv", *_EXACT[3:])

Int64 = npt.NDArray[np.int64]


class PhaseProfile:
    """Collects steps. For each kind of rows and phase: the median over steps of its sum over layers."""

    def __init__(self, num_layers: int) -> None:
        self.clock: Int64 = np.zeros(num_layers * len(_WIDE) + 2, np.int64)
        self._num_layers = num_layers
        self._started = self._last = (0, 0)  # nanoseconds, cycles
        self._steps: dict[str, list[Int64]] = {}

    def add(self, task: int) -> None:
        """After a job: take what it wrote."""
        if task == TASK_HEAD:
            return
        kind, names = ("wide", _WIDE) if task == TASK_WIDE else ("exact", _EXACT)
        count = self._num_layers * len(names)
        spans = np.diff(self.clock[: count + 1]).reshape(self._num_layers, len(names))
        self._steps.setdefault(kind, []).append(spans.sum(0))
        if not self._started[1]:
            self._started = (time.perf_counter_ns(), int(self.clock[count]))
        self._last = (time.perf_counter_ns(), int(self.clock[count]))

    def take(self) -> dict[str, dict[str, float]]:
        """Milliseconds a step, by kind and phase, since the last time."""
        steps, self._steps = self._steps, {}
        if not steps:
            return {}
        nanoseconds, cycles = (b - a for a, b in zip(self._started, self._last, strict=True))
        per_ms = cycles / nanoseconds * 1e6 if cycles > 0 else float("nan")
        names = {"wide": _WIDE, "exact": _EXACT}
        return {
            kind: dict(
                zip(names[kind], np.round(np.median(found, 0) / per_ms, 2).tolist(), strict=True)
            )
            for kind, found in steps.items()
        }
