"""What a forward pass waits for when the KV of earlier tokens is still coming, layer by layer."""

import itertools
from collections.abc import Sequence
from typing import Protocol

LayerRange = tuple[int, int]
"""First layer, and the one behind the last."""


class LayerGate(Protocol):
    """One for a step. A network whose `waits_for_layers` is true asks it on its way through the layers.

        for first, end in gate.ranges(num_layers):
            gate.wait(end)
            ...                                     # layers first .. end - 1

    On a device that computes by itself `wait` may return when what it waited for is queued ahead.
    """

    def ranges(self, num_layers: int) -> Sequence[LayerRange]:
        """The layers in parts, in order and without gaps: what comes together."""
        ...

    def wait(self, end: int) -> None:
        """Return when layers before `end` have their KV, or when waiting is over all the same.

        Then the step goes on: what it computes of the sequence that lacked them is not used.
        """
        ...


def whole(num_layers: int) -> list[LayerRange]:
    """All layers at once: what a step does that waits for nothing."""
    return [(0, num_layers)]


def in_parts(num_layers: int, num_parts: int) -> list[LayerRange]:
    """About equal parts, none of them empty."""
    parts = max(1, min(num_parts, num_layers))
    edges = [index * num_layers // parts for index in range(parts + 1)]
    return list(itertools.pairwise(edges))
