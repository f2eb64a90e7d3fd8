"""A log line is one JSON object that says who, and never holds local variables."""

import json
import logging as std
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finback.shared.telemetry import logging, tracing


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = std.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers, root.level = before[0], before[1]
    logging.reset()


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_says_who_and_which_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logging.setup("router", "router-1")
    tracing.setup("router", "router-1", trace_dir=str(tmp_path))
    with tracing.span("x"):
        logging.get_logger("m").info("placed", request_id="r1")
        trace_id = tracing.trace_id()
    tracing.shutdown()
    (line,) = _lines(capsys)
    assert line["event"] == "placed"
    assert (line["service"], line["instance"]) == ("router", "router-1")
    assert (line["request_id"], line["trace_id"]) == ("r1", trace_id)
    assert line["level"] == "info"


def test_a_traceback_has_no_locals(capsys: pytest.CaptureFixture[str]) -> None:
    logging.setup("a", "a-1")
    prompt = "secret " + "prompt"
    try:
        raise ValueError
    except ValueError:
        logging.get_logger("m").exception("failed")
    captured = capsys.readouterr().err
    assert "ValueError" in captured
    assert prompt not in captured


def test_levels_and_other_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    logging.setup("a", "a-1", "warning")
    logging.get_logger("m").info("quiet")
    std.getLogger("lib").warning("loud %d", 1)
    std.getLogger("lib").info("quiet")
    assert [line["event"] for line in _lines(capsys)] == ["loud 1"]
