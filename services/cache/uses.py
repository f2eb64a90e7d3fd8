"""Of how many blocks that were asked for it is known where they lay, by traffic class. Pure."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from finback.services.cache.retention import CLASSES
from finback.shared.telemetry.metrics import Metrics

LOOKUP: Final = "lookup"  # what a prompt could have had
READ: Final = "read"  # what was really handed out


class Uses:
    """Counts blocks by what was asked, class and outcome: a tier, or why a run ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, what: str, class_name: str, outcomes: dict[str, int]) -> None:
        """Blocks by outcome. A class that nobody knows is none."""
        class_ = class_name if class_name in CLASSES else ""
        for outcome, number in outcomes.items():
            if number > 0:
                self._counts[what, class_, outcome] += number
                labels = {"what": what, "class_": class_, "outcome": outcome}
                self._metrics.count("finback.cache.blocks_asked", number, **labels)

    def items(self) -> Iterator[tuple[str, str, str, int]]:
        """(what, class, outcome, blocks)."""
        for (what, class_, outcome), number in sorted(self._counts.items()):
            yield what, class_, outcome, number
