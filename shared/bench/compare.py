"""Two records side by side. Pure, but for the table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from finback.shared.bench.columns import COLUMNS, Column
from finback.shared.bench.record import Line, spread_of
from finback.shared.bench.report import heading
from finback.shared.bench.stats import Spread

# Where two runs differ in one of these, their figures are not of the same thing.
_SAME: Final = (
    ("workload", "scale"),
    ("workload", "num_requests"),
    ("workload", "digest"),
    ("workload", "temperature"),
    ("workload", "concurrency"),
    ("workload", "clients"),
    ("workload", "is_whole"),
    ("workload", "targets"),
    ("target", "mode"),
    ("target", "model"),
    ("target", "device"),
    ("target", "drafting"),
    ("target", "deterministic"),
    ("target", "kv_dtype"),
    ("target", "engine"),
    ("environment", "cpu"),
    ("environment", "cores"),
    ("environment", "gpus"),
    ("environment", "versions"),
)


# Digests are longer, and nobody reads them to the end.
_MAX_SHOWN: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of both. `ratio`: b / a, None where a is 0."""

    column: Column
    a: Spread
    b: Spread

    @property
    def ratio(self) -> float | None:
        return self.b.median / self.a.median if self.a.median else None

    @property
    def verdict(self) -> str:
        """What the two ranges allow to say: "better", "worse", or nothing where they overlap."""
        if self.column.is_more_better is None or self.a.overlaps(self.b):
            return ""
        return (
            "better" if (self.b.median > self.a.median) == self.column.is_more_better else "worse"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two summaries of one workload (and rate)."""

    a: Line
    b: Line

    def rows(self) -> list[Row]:
        found = []
        for column in COLUMNS:
            a, b = spread_of(self.a, column.name), spread_of(self.b, column.name)
            if a is not None and b is not None:
                found.append(Row(column=column, a=a, b=b))
        return found

    def differences(self) -> list[str]:
        """What beside the figures differs, in words."""
        found = []
        for part, name in _SAME:
            a, b = self.a[part].get(name), self.b[part].get(name)
            if isinstance(a, dict) and isinstance(b, dict):
                names = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
                found += [
                    f"{name} {key}: {_text(a.get(key))}, {_text(b.get(key))}" for key in names
                ]
            elif a != b:
                found.append(f"{part} {name}: {_text(a)}, {_text(b)}")
        for which, line in (("A", self.a), ("B", self.b)):
            if not line["is_complete"]:
                found.append(f"{which} was cut short")
        return found


def pairs(first: Sequence[Line], second: Sequence[Line]) -> tuple[list[Pair], list[str]]:
    """Summaries of the same workload, scale and rate; and what only one of the two has.

    Of several with one key in a file the last counts.
    """
    a, b = ({_key(line): line for line in lines} for lines in (first, second))
    both = [Pair(a=a[key], b=b[key]) for key in a if key in b]
    lonely = [f"only in A: {_name(key)}" for key in a if key not in b]
    return both, lonely + [f"only in B: {_name(key)}" for key in b if key not in a]


def show(console: Console, pair: Pair) -> None:
    """The table of one pair, with its warnings before it."""
    for name, line in (("A", pair.a), ("B", pair.b)):
        about = line["environment"]
        commit = (about.get("commit") or "no commit")[:12]
        console.print(f"{name}  {heading(line)}; {commit}, {about.get('started')}", soft_wrap=True)
    for difference in pair.differences():
        console.print(f"[yellow]differs:[/yellow] {difference}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "A", "B", "", "B / A", "spread A", "spread B", ""):
        table.add_column(name, justify="left" if name == "" else "right")
    colours = {"better": "[green]better[/green]", "worse": "[red]worse[/red]", "": ""}
    for row in pair.rows():
        column = row.column
        table.add_row(
            column.title,
            column.text(row.a.median),
            column.text(row.b.median),
            column.unit,
            "" if row.ratio is None else f"{row.ratio:.3f}",
            f"{100 * row.a.relative:.1f} %",
            f"{100 * row.b.relative:.1f} %",
            colours[row.verdict],
        )
    console.print(table)


def as_json(pair: Pair) -> Line:
    """The same for scripts."""
    return {
        "workload": pair.a["workload"]["name"],
        "rate_per_s": pair.a["workload"]["rate_per_s"],
        "differences": pair.differences(),
        "figures": {
            row.column.name: {
                "a": row.a.median,
                "b": row.b.median,
                "ratio": row.ratio,
                "overlap": row.a.overlaps(row.b),
                "verdict": row.verdict,
            }
            for row in pair.rows()
        },
    }


_Key = tuple[str, float | None]


def _key(line: Line) -> _Key:
    return line["workload"]["name"], line["workload"]["rate_per_s"]


def _name(key: _Key) -> str:
    return key[0] if key[1] is None else f"{key[0]} at {key[1]:g}/s"


def _text(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:12]}…"
