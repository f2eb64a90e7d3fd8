"""Spans, their file, and what travels in headers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from finback.shared.errors import ConfigError, Overloaded
from finback.shared.telemetry import tracing


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[Path]:
    tracing.setup("router", "router-1", trace_dir=str(tmp_path))
    yield tmp_path
    tracing.shutdown()


def _spans(folder: Path) -> dict[str, dict[str, Any]]:
    tracing.shutdown()
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return {record["name"]: record for record in map(json.loads, lines)}


def test_spans_nest_and_carry_who_and_what(traces: Path) -> None:
    with (
        tracing.span("outer", {tracing.REQUEST_ID: "r1"}),
        tracing.span("inner", n=3, parent=None),
    ):
        tracing.annotate(finback__reason="why")
    found = _spans(traces)
    outer, inner = found["outer"], found["inner"]
    assert inner["trace_id"] == outer["trace_id"]
    assert inner["parent_id"] == outer["span_id"]
    assert outer["parent_id"] == ""
    assert inner["attributes"] == {"n": 3, "finback.reason": "why"}
    assert (outer["service"], outer["instance"]) == ("router", "router-1")
    assert outer["start_ns"] <= inner["start_ns"] <= inner["end_ns"] <= outer["end_ns"]
    assert (traces / "router-1.jsonl").stat().st_mode & 0o777 == 0o600


def test_an_error_marks_its_span(traces: Path) -> None:
    with pytest.raises(Overloaded), tracing.span("refused"):
        raise Overloaded("full")
    found = _spans(traces)["refused"]
    assert found["status"] == "error"
    assert found["attributes"]["error.type"] == "resource_exhausted"


def test_context_travels_in_headers(traces: Path) -> None:
    headers: dict[str, str] = {}
    with tracing.span("here") as here:
        tracing.inject(headers)
    parent = tracing.extract(headers)
    assert parent is not None
    with tracing.span("there", parent=parent) as there:
        assert there.get_span_context().trace_id == here.get_span_context().trace_id
    found = _spans(traces)
    assert found["there"]["parent_id"] == found["here"]["span_id"]


@pytest.mark.parametrize(
    "value",
    ["", "garbage", "00-0-0-01", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff-" + "a" * 51],
)
def test_a_bad_header_begins_a_new_trace(traces: Path, value: str) -> None:
    assert tracing.extract({"traceparent": value}) is None


def test_the_sampled_flag_is_honoured(traces: Path) -> None:
    unsampled = f"00-{'a' * 32}-{'b' * 16}-00"
    parent = tracing.extract({"traceparent": unsampled})
    headers: dict[str, str] = {}
    with tracing.span("quiet", parent=parent):
        tracing.inject(headers)
    assert headers["traceparent"].startswith(f"00-{'a' * 32}")
    assert headers["traceparent"].endswith("-00")
    assert "quiet" not in _spans(traces)


def test_an_oversized_tracestate_is_dropped(traces: Path) -> None:
    good = f"00-{'a' * 32}-{'b' * 16}-01"
    small = tracing.extract({"traceparent": good, "tracestate": "v=1"})
    large = tracing.extract({"traceparent": good, "tracestate": f"v={'x' * 200},w={'y' * 400}"})
    for context, wanted in ((small, "v=1"), (large, None)):
        assert context is not None
        headers: dict[str, str] = {}
        tracing.inject(headers, context)
        assert headers["traceparent"] == good
        assert headers.get("tracestate") == wanted


def test_ranges_measured_elsewhere(traces: Path) -> None:
    with tracing.span("request"):
        parent = tracing.current()
    tracing.record_span("decode steps", 1_000, 5_000, parent, {"steps": 4})
    found = _spans(traces)
    steps = found["decode steps"]
    assert (steps["start_ns"], steps["end_ns"]) == (1_000, 5_000)
    assert steps["parent_id"] == found["request"]["span_id"]


def test_the_file_is_rotated(tmp_path: Path) -> None:
    tracing.setup("a", "a-1", trace_dir=str(tmp_path), max_file_bytes=4096)
    for i in range(200):
        with tracing.span(f"span {i}"):
            pass
        if i % 10 == 0:
            tracing.flush()
    tracing.shutdown()
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"a-1.jsonl", "a-1.1.jsonl"}
    assert all(size <= 8192 for size in sizes.values())


def test_files_of_earlier_starts_are_bounded(tmp_path: Path) -> None:
    for i in range(20):
        tracing.setup("a", f"a-{i:02}", trace_dir=str(tmp_path))
        with tracing.span("x"):
            pass
    tracing.shutdown()
    (tmp_path / "b-1.jsonl").touch()
    names = sorted(path.name for path in tmp_path.glob("a-*"))
    assert len(names) <= 9
    assert names[-1] == "a-19.jsonl"


def test_without_setup_nothing_is_recorded_and_nothing_fails() -> None:
    tracing.shutdown()
    headers: dict[str, str] = {}
    with tracing.span("unseen"):
        tracing.inject(headers)
        tracing.record_span("x", 1, 2)
    assert headers == {}
    assert not trace.get_current_span().get_span_context().is_valid


def test_otlp_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    from finback.shared.telemetry import exporters  # before the patch: it imports more itself

    assert exporters
    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'finback\[otlp\]'"):
        tracing.setup("a", "a-1", otlp_endpoint="http://localhost:4318")
