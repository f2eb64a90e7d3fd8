"""How figures are shown: their names, units and order. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from finback.shared.bench.stats import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A figure by its dotted name. `is_more_better` None: neither."""

    name: str
    title: str
    unit: str
    times: float = 1.0
    is_more_better: bool | None = None
    digits: int = 1

    def text(self, value: float) -> str:
        return f"{value * self.times:,.{self.digits}f}"


def _milliseconds(name: str, title: str) -> list[Column]:
    return [
        Column(
            name=f"{name}.{which}",
            title=f"{title} {which}",
            unit="ms",
            times=1e3,
            is_more_better=False,
        )
        for which in ("p50", "p90", "p99")
    ]


_MIB: Final = 1 / 2**20

COLUMNS: Final = (
    Column(name="output_tokens_per_s", title="output", unit="tokens/s", is_more_better=True),
    Column(name="prompt_tokens_per_s", title="prompt", unit="tokens/s", is_more_better=True),
    Column(
        name="requests_per_s", title="requests", unit="1/s", is_more_better=True, digits=2
    ),
    Column(name="elapsed_s", title="elapsed", unit="s", is_more_better=False, digits=3),
    *_milliseconds("ttft_s", "TTFT"),
    *_milliseconds("tpot_s", "TPOT"),
    *_milliseconds("itl_s", "ITL"),
    *_milliseconds("e2e_s", "request"),
    Column(
        name="goodput.requests_per_s", title="goodput", unit="1/s", is_more_better=True, digits=2
    ),
    Column(
        name="goodput.share", title="within targets", unit="%", times=100, is_more_better=True
    ),
    Column(name="limit.share", title="of the limit", unit="%", times=100, is_more_better=True),
    Column(name="limit.output_tokens_per_s", title="limit", unit="tokens/s"),
    Column(
        name="cpu_ms_per_token", title="CPU", unit="ms/token", is_more_better=False, digits=3
    ),
    Column(name="client_cpu_s", title="client CPU", unit="s", digits=2),
    Column(
        name="peak_rss_bytes", title="peak RSS", unit="MiB", times=_MIB, digits=0,
        is_more_better=False,
    ),
    Column(
        name="pss_bytes", title="PSS at the end", unit="MiB", times=_MIB, digits=0,
        is_more_better=False,
    ),
    Column(
        name="device_used_bytes", title="device memory", unit="MiB", times=_MIB, digits=0,
        is_more_better=False,
    ),
    Column(name="output_tokens", title="output tokens", unit="", digits=0),
    Column(name="cached_tokens", title="cached prompt tokens", unit="", digits=0),
    Column(name="num_refusals", title="refusals", unit="", digits=0, is_more_better=False),
    Column(name="entropy.empirical_bits", title="token entropy", unit="bits", digits=2),
)  # fmt: skip


def shown(spread_of: Callable[[str], Spread | None]) -> list[tuple[Column, Spread]]:
    """The columns that a run has. Percentiles of a single value are that value: one is enough."""
    found = []
    for column in COLUMNS:
        spread = spread_of(column.name)
        stem, dot, which = column.name.rpartition(".")
        is_again = bool(dot) and which in ("p90", "p99") and spread == spread_of(f"{stem}.p50")
        if spread is not None and not is_again:
            found.append((column, spread))
    return found


def range_text(column: Column, spread: Spread) -> str:
    """`low to high`, or nothing where there is one value."""
    if spread.num < 2 or spread.low == spread.high:
        return ""
    return f"{column.text(spread.low)} to {column.text(spread.high)}"
