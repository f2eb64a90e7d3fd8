"""Throughput against latency, as a picture: one line a file, one point a rate of `chat`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finback.shared.bench.record import Line, spread_of
from finback.shared.errors import ConfigError

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
PERCENTILES: Final = ("p50", "p90", "p95", "p99")
SUFFIXES: Final = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points in the order of their throughput; milliseconds, with least and most of repetitions."""

    label: str
    tokens_per_s: tuple[float, ...]
    latency_ms: tuple[float, ...]
    low_ms: tuple[float, ...]
    high_ms: tuple[float, ...]


def curve(label: str, summaries: Sequence[Line], latency: str, percentile: str) -> Curve:
    """From a file's summaries. Raises `ConfigError` if it has no such latency."""
    if latency not in LATENCIES:
        raise ConfigError(f"latency must be one of {', '.join(LATENCIES)}, not {latency!r}")
    if percentile not in PERCENTILES:
        raise ConfigError(f"percentile must be one of {', '.join(PERCENTILES)}, not {percentile!r}")
    points = []
    for summary in summaries:
        if summary["workload"]["rate_per_s"] is None:
            continue
        across = spread_of(summary, "output_tokens_per_s")
        up = spread_of(summary, f"{latency}_s.{percentile}")
        if across is not None and up is not None:
            points.append((across.median, 1e3 * up.median, 1e3 * up.low, 1e3 * up.high))
    if not points:
        raise ConfigError(f"{label}: no chat with {latency} {percentile} in it")
    columns = list(zip(*sorted(points), strict=True))
    return Curve(
        label=label,
        tokens_per_s=columns[0],
        latency_ms=columns[1],
        low_ms=columns[2],
        high_ms=columns[3],
    )


def draw(curves: Sequence[Curve], latency: str, percentile: str, path: Path) -> None:
    """Write the picture. Raises `ConfigError` if it cannot be drawn or written."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"output must end with {', '.join(SUFFIXES)}, not {path.name!r}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plot needs matplotlib: pip install 'finback[bench]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for one in curves:
        below = [m - low for m, low in zip(one.latency_ms, one.low_ms, strict=True)]
        above = [high - m for m, high in zip(one.latency_ms, one.high_ms, strict=True)]
        axes.errorbar(
            one.tokens_per_s, one.latency_ms, yerr=[below, above], marker="o", capsize=3,
            label=one.label,
        )  # fmt: skip
    axes.set_xlabel("output tokens/s")
    axes.set_ylabel(f"{latency.upper()} {percentile}, ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"output: cannot write {path}: {error.strerror}") from None
