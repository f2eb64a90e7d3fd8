"""What has happened to blocks since the process began, for `stats` and as metrics alike."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from finback.shared.telemetry.metrics import Metrics

# What is counted: its metric, and the name of the metric's label.
_METRICS: Final = {
    "hit": ("finback.cache.hits", "tier"),
    "miss": ("finback.cache.misses", "reason"),
    "gone": ("finback.cache.given_up", "reason"),
    "refused": ("finback.cache.not_stored", "reason"),
}


class Tallies:
    """Counts by what and label."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, what: str, label: str, count: int = 1) -> None:
        """Count; nothing is told of a count of 0."""
        if count:
            self._counts[what, label] += count
            name, label_name = _METRICS[what]
            self._metrics.count(name, count, **{label_name: label})

    def move(self, what: str, counter: "Counter[str]") -> None:
        """Take over what a counter holds, and empty it."""
        for label, count in counter.items():
            self.add(what, label, count)
        counter.clear()

    def items(self) -> Iterator[tuple[str, str, int]]:
        """(what, label, count) of everything."""
        for (what, label), count in sorted(self._counts.items()):
            yield what, label, count
