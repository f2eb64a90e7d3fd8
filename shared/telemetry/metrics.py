"""Counters, gauges and histograms by dotted name; Prometheus spells them with underscores.

OpenTelemetry's `gen_ai.*` names are used where they exist, ours are `finback.<service>.<noun>`.
Histograms are in seconds unless the name says otherwise.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"
REQUEST_DURATION: Final = "gen_ai.server.request.duration"
TOKEN_USAGE: Final = "gen_ai.client.token.usage"

# Bucket bounds as OTel's semantic conventions for generative AI advise.
_BUCKETS: Final[dict[str, tuple[float, ...]]] = {
    TIME_TO_FIRST_TOKEN: (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
    TIME_PER_OUTPUT_TOKEN: (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
        2.5,
    ),
    REQUEST_DURATION: (
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    ),
    TOKEN_USAGE: tuple(float(4**i) for i in range(14)),
}  # fmt: skip
_DEFAULT_BUCKETS: Final = tuple(0.0001 * 2**i for i in range(20))
_SECONDS: Final = frozenset({TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, REQUEST_DURATION})


class Metrics:
    """One process's metrics. The label names of a metric are those of its first use."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter."""
        counter = self._counters.get(name)
        if counter is None:
            counter = self._counters[name] = Counter(
                _spelled(name), name, tuple(labels), registry=self.registry
            )
        (counter.labels(**labels) if labels else counter).inc(amount)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = self._gauges[name] = Gauge(
                _spelled(name), name, tuple(labels), registry=self.registry
            )
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Add a value to a histogram."""
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = Histogram(
                _spelled(name),
                name,
                tuple(labels),
                buckets=_BUCKETS.get(name, _DEFAULT_BUCKETS),
                registry=self.registry,
            )
        (histogram.labels(**labels) if labels else histogram).observe(value)

    def value(self, name: str, /, **labels: str) -> float:
        """Current value of a counter or gauge; 0 if it was never used."""
        spelled = _spelled(name)
        for sample in (f"{spelled}_total", spelled):
            found = self.registry.get_sample_value(sample, labels)
            if found is not None:
                return found
        return 0.0

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def snapshot(self) -> dict[str, float]:
        """Counters and gauges (and histograms' sums and counts) as plain numbers."""
        return {
            _key(sample.name, sample.labels): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))
        }


def _spelled(name: str) -> str:
    unit = "_seconds" if name in _SECONDS else ""
    return name.replace(".", "_").replace("-", "_") + unit


def _key(name: str, labels: dict[str, str]) -> str:
    if not labels:
        return name
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"{name}{{{inner}}}"
