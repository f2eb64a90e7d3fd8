"""One trace as a waterfall for the terminal."""

from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from finback.services.supervisor.trace_tree import Row, Span, request_of, rows

_COLOURS: Final = {
    "gateway": "cyan",
    "router": "magenta",
    "cache": "yellow",
    "sampler": "blue",
    "drafter": "bright_red",
    "prefill": "bright_green",
    "decode": "green",
}
_MIN_BAR: Final = 16
_OTHER_COLUMNS: Final = 70


def draw(spans: list[Span], console: Console) -> None:
    """Print the trace: one row a span, its place in time as a bar, its own start and length."""
    lines = rows(spans)
    first_ns = min(line.start_ns for line in lines)
    whole_ns = max(1, max(line.end_ns for line in lines) - first_ns)
    width = max(_MIN_BAR, console.width - _OTHER_COLUMNS)
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="bold")
    table.add_column("service", no_wrap=True)
    table.add_column("span", no_wrap=True, overflow="ellipsis", max_width=34)
    table.add_column("at ms", justify="right", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, width=width)
    for line in lines:
        colour = "red" if line.status == "error" else _COLOURS.get(line.service, "white")
        table.add_row(
            Text(line.service, style=colour),
            Text("  " * line.depth + _label(line)),
            _ms(line.start_ns - first_ns),
            _ms(line.busy_ns),
            Text(bar(line, first_ns, whole_ns, width), style=colour),
        )
    ordered = sorted(spans, key=lambda span: span.start_ns)
    ids = dict.fromkeys(request_of(span) for span in ordered)
    services = ", ".join(sorted({span.service for span in spans}))
    console.print(
        f"trace {spans[0].trace_id}: {len(spans)} spans, {_ms(whole_ns)} ms", style="bold"
    )
    console.print(f"from {services}")
    for request_id in filter(None, ids):
        console.print(f"request {request_id}")
    console.print(table)


def bar(line: Row, first_ns: int, whole_ns: int, width: int) -> str:
    """Blank up to the start, then a mark for the time taken; at least one character."""
    start = min(width - 1, int((line.start_ns - first_ns) / whole_ns * width))
    length = max(1, round((line.end_ns - line.start_ns) / whole_ns * width))
    mark = "━" if line.count == 1 else "╍"
    return " " * start + mark * min(length, width - start)


def _label(line: Row) -> str:
    return line.name if line.count == 1 else f"{line.name} x{line.count}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f}" if ns < 1e8 else f"{ns / 1e6:.0f}"
