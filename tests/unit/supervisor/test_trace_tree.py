"""Traces from files to rows, and rows to bars."""

import io
import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from finback.services.supervisor import trace_tree, waterfall
from finback.services.supervisor.trace_tree import Row, Span

MS = 1_000_000


def span(name: str, span_id: str, parent: str, start: int, end: int, **more: Any) -> Span:
    values: dict[str, Any] = {"service": "gateway", "trace_id": "t1", "attributes": {}, **more}
    return Span(
        name=name,
        span_id=span_id,
        parent_id=parent,
        start_ns=start * MS,
        end_ns=end * MS,
        **values,
    )


ROOT = span("gateway chat", "a", "", 0, 100, attributes={"finback.request_id": "req-1"})


def test_spans_are_read_from_every_file_and_half_lines_are_skipped(tmp_path: Path) -> None:
    line = {
        "name": "n",
        "service": "s",
        "trace_id": "t",
        "span_id": "a",
        "parent_id": "",
        "start_ns": 1,
        "end_ns": 2,
        "kind": "internal",
        "status": "ok",
        "attributes": {"k": 1},
    }
    (tmp_path / "one.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line)[:20])
    (tmp_path / "two.1.jsonl").write_text(json.dumps({**line, "span_id": "b"}) + "\n[]\n")
    assert [found.span_id for found in trace_tree.read(tmp_path)] == ["a", "b"]


def test_a_trace_is_found_by_request_by_trace_and_as_last() -> None:
    late = span(
        "gateway chat", "z", "", 200, 300, trace_id="t2", attributes={"finback.request_id": "req-2"}
    )
    spans = [
        ROOT,
        span("route", "b", "a", 1, 2),
        late,
        span("route", "y", "z", 201, 202, trace_id="t2"),
    ]
    assert {s.span_id for s in trace_tree.find(spans, "req-1")} == {"a", "b"}
    assert {s.span_id for s in trace_tree.find(spans, "t1")} == {"a", "b"}
    assert {s.span_id for s in trace_tree.find(spans, "last")} == {"z", "y"}
    assert trace_tree.find(spans, "nobody") == []
    assert trace_tree.find([], "last") == []


def test_rows_go_down_before_they_go_on() -> None:
    spans = [
        span("late", "d", "a", 50, 60),
        span("early", "b", "a", 1, 10),
        ROOT,
        span("below early", "c", "b", 2, 3),
        span("lost parent", "e", "gone", 5, 6),
    ]
    rows = trace_tree.rows(spans)
    assert [(row.name, row.depth) for row in rows] == [
        ("gateway chat", 0),
        ("early", 1),
        ("below early", 2),
        ("late", 1),
        ("lost parent", 0),
    ]


def test_many_equal_siblings_become_one_row() -> None:
    spans = [ROOT, *(span("draft", f"d{i}", "a", i, i + 1) for i in range(10))]
    spans += [span("work", f"w{i}", f"d{i}", i, i + 1) for i in range(10)]
    rows = trace_tree.rows(spans)
    assert [(row.name, row.count, row.depth) for row in rows] == [
        ("gateway chat", 1, 0),
        ("draft", 10, 1),
        ("work", 10, 2),
    ]
    assert rows[1].busy_ns == 10 * MS
    assert (rows[1].start_ns, rows[1].end_ns) == (0, 10 * MS)


@given(
    start=st.integers(0, 10**9),
    length=st.integers(0, 10**9),
    width=st.integers(16, 200),
)
def test_a_bar_stays_in_its_column_and_is_never_empty(start: int, length: int, width: int) -> None:
    row = Row(name="n", service="s", depth=0, start_ns=start, end_ns=start + length, busy_ns=length)
    drawn = waterfall.bar(row, 0, start + length + 1, width)
    assert len(drawn) <= width
    assert drawn.strip()


def test_a_waterfall_names_services_and_the_request() -> None:
    out = io.StringIO()
    waterfall.draw(
        [ROOT, span("route", "b", "a", 1, 2, service="router")], Console(file=out, width=120)
    )
    text = out.getvalue()
    assert "req-1" in text
    assert "router" in text
    assert "gateway chat" in text
    assert " 100 " in text
