"""The tables that a person reads after a bench."""

from rich.console import Console
from rich.table import Table

from finback.shared.bench.columns import range_text, shown
from finback.shared.bench.record import Line, spread_of

CURVE = (
    "rate",
    "requests/s",
    "tokens/s",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "goodput",
)


def show(console: Console, summary: Line) -> None:
    """One summary: what ran, where, and every figure with its spread."""
    console.print(heading(summary), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("")
    table.add_column("least to most", justify="right")
    for column, spread in shown(lambda name: spread_of(summary, name)):
        table.add_row(
            column.title, column.text(spread.median), column.unit, range_text(column, spread)
        )
    console.print(table)
    if text := _cpu_by_process(summary):
        console.print(text, soft_wrap=True)
    if probe := summary.get("probe"):
        console.print(_sampling(summary["workload"]["temperature"], probe), soft_wrap=True)
    if not summary["is_complete"]:
        console.print("[yellow]cut short:[/yellow] these figures are of what was measured")


def heading(summary: Line) -> str:
    """`decode: 512 requests, … on … (offline), median of 5`."""
    work, target, about = summary["workload"], summary["target"], summary["environment"]
    rate = f" at {work['rate_per_s']:g}/s" if work["rate_per_s"] is not None else ""
    scale = f", lengths times {work['scale']:g}" if work["scale"] != 1 else ""
    gpus = about["gpus"] if target.get("device") == "cuda" else []
    device = gpus[0] if gpus else f"{about['cpu']}, {about['cores']} cores"
    at = "from" if target.get("device") is None else "on"  # of a service elsewhere nothing is known
    return (
        f"[bold]{work['name']}[/bold]{rate}: {work['num_requests']} requests, "
        f"{work['prompt_tokens']} tokens in, {work['output_tokens']} out{scale}; "
        f"{target['model']} ({target['mode']}) {at} {device}; median of {summary['repetitions']}"
    )


def show_curve(console: Console, summaries: list[Line]) -> None:
    """Throughput against latency, a row for each rate."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in CURVE:
        table.add_column(name, justify="right")
    for summary in summaries:

        def cell(name: str, times: float = 1.0, digits: int = 1, of: Line = summary) -> str:
            spread = spread_of(of, name)
            return "" if spread is None else f"{spread.median * times:,.{digits}f}"

        table.add_row(
            f"{summary['workload']['rate_per_s']:g}/s",
            cell("requests_per_s", digits=2),
            cell("output_tokens_per_s"),
            *(cell(f"{which}.{p}", 1e3) for which in ("ttft_s", "tpot_s") for p in ("p50", "p99")),
            cell("goodput.requests_per_s", digits=2),
        )
    console.print(table)


def _cpu_by_process(summary: Line) -> str:
    """`CPU by process, ms/token: decode 3.41, gateway 0.60`, the largest first."""
    prefix = "cpu_ms_per_token_of."
    found = {
        name.removeprefix(prefix): figure["median"]
        for name, figure in summary["figures"].items()
        if name.startswith(prefix)
    }
    ordered = sorted(found.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {value:.3f}" for name, value in ordered)
    return f"CPU by process, ms/token: {told}" if told else ""


def _sampling(temperature: float, probe: Line) -> str:
    text = f"sampling at temperature {temperature:g} over the full vocabulary: "
    if "surprisal_bits" in probe:
        text += f"mean surprisal {probe['surprisal_bits']:.2f} bits, "
    return text + (
        f"empirical entropy {probe['empirical_bits']:.2f} bits "
        f"({probe['num_distinct']} distinct among {probe['num_tokens']} tokens of an untimed run)"
    )
