"""Blocks of one prompt on their way into the pool, layer by layer, while a step computes behind them.

A thread copies (`layer_copy`), the device thread waits before each part of the layers (`StepGate`),
the event loop settles what came of it. The checksum of a block covers all its layers, so the last part
is not told before every block was judged: a step that got past it computed with good bytes only.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from finback.shared.clock import monotonic_s
from finback.shared.models.layer_gate import LayerRange, in_parts

NUM_PARTS: Final = 6
"""Parts of the layers: few enough that a step is not cut into too many calls."""
MAX_WAIT_S: Final = 1.0
"""What a step waits at most, all parts together; then the prompt is computed instead."""


class Arrival:
    """See the module. Any thread may ask; one thread tells."""

    def __init__(self, num_layers: int, num_blocks: int) -> None:
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.parts: Sequence[LayerRange] = in_parts(num_layers, NUM_PARTS)
        # Leading blocks that are whole and good; meaningful once it is over.
        self.num_good = 0
        self._ready = 0
        self._is_over = False
        self._is_given_up = False
        self._changed = threading.Condition()

    # -- the thread that copies

    def tell(self, end: int) -> None:
        """Layers before `end` of all blocks lie in the pool."""
        with self._changed:
            self._ready = end
            self._changed.notify_all()

    def conclude(self, num_good: int) -> None:
        """No more is written; the first `num_good` blocks are what they should be."""
        with self._changed:
            self.num_good = num_good
            self._is_over = True
            if num_good == self.num_blocks:
                self._ready = self.num_layers
            self._changed.notify_all()

    @property
    def is_given_up(self) -> bool:
        """Does nobody wait for it any more?"""
        return self._is_given_up

    # -- who waits

    @property
    def is_over(self) -> bool:
        """Will nothing more be written?"""
        return self._is_over

    def wait(self, end: int, deadline_s: float) -> bool:
        """Return when layers before `end` are there; False: they will not be, or not in time."""
        with self._changed:
            while self._ready < end and not self._is_over:
                left_s = deadline_s - monotonic_s()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            return self._ready >= end

    def give_up(self) -> None:
        """Stop copying soon."""
        self._is_given_up = True


class StepGate:
    """The `LayerGate` of a step; `lacking`: the arrivals that failed it, whose items are void."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._arrivals = list(arrivals)
        self._deadline_s = monotonic_s() + MAX_WAIT_S
        self.lacking: set[Arrival] = set()

    def ranges(self, num_layers: int) -> Sequence[LayerRange]:
        """See `LayerGate`."""
        return in_parts(num_layers, NUM_PARTS)

    def wait(self, end: int) -> None:
        """See `LayerGate`."""
        for arrival in self._arrivals:
            if arrival not in self.lacking and not arrival.wait(end, self._deadline_s):
                self.lacking.add(arrival)
                arrival.give_up()
