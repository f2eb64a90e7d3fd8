"""Records: written whole, read back, compared, drawn; bad input is named."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from finback.shared.bench import compare, plot, report
from finback.shared.bench.options import BenchOptions, parse_rates
from finback.shared.bench.record import Line, Recorder, read_summaries, spread_of, summary_line
from finback.shared.bench.stats import Spread
from finback.shared.errors import ConfigError


def head(**workload: Any) -> Line:
    about = {"cpu": "a cpu", "cores": 2, "gpus": [], "versions": {"python": "3.11", "torch": "2.8"}}
    work = {
        "name": "chat",
        "digest": "d",
        "num_requests": 3,
        "prompt_tokens": 9,
        "output_tokens": 6,
        "rate_per_s": 2.0,
        "scale": 1.0,
        "concurrency": 0,
        "clients": 1,
        "temperature": 0.6,
        "is_whole": False,
        "targets": None,
    }
    target = {"mode": "http", "model": "m", "device": "cpu", "drafting": False}
    return {"workload": work | workload, "target": target, "environment": about}


def summary(speed: float, ttft_s: float = 0.1, **workload: Any) -> Line:
    spreads = {
        "output_tokens_per_s": Spread(median=speed, low=speed - 5, high=speed + 5, num=3),
        "ttft_s.p99": Spread(median=ttft_s, low=ttft_s, high=2 * ttft_s, num=3),
        "elapsed_s": Spread(median=0.0, low=0.0, high=0.0, num=3),
    }
    return summary_line(head(**workload), spreads, repetitions=3, is_complete=True, probe=None)


def write(path: Path, *lines: Line) -> Path:
    with Recorder(path) as recorder:
        for line in lines:
            recorder.add(line)
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"kind": "repetition"}, summary(100.0))
    write(path, summary(50.0, rate_per_s=1.0))
    found = read_summaries(path)
    assert [line["workload"]["rate_per_s"] for line in found] == [2.0, 1.0]
    assert spread_of(found[0], "output_tokens_per_s") == Spread(
        median=100.0, low=95.0, high=105.0, num=3
    )
    assert spread_of(found[0], "no such") is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not an object"),
        ("\n", "no summary"),
        ('{"kind":"summary","version":9}', "line 1: version 9, not 1"),
    ],
)
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_summaries(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_summaries(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="output: cannot write"):
        Recorder(tmp_path / "no" / "folder.jsonl")


def test_a_comparison_says_what_the_spreads_allow() -> None:
    both, lonely = compare.pairs(
        [summary(100.0), summary(1.0, rate_per_s=9.0)], [summary(120.0), summary(130.0)]
    )
    assert lonely == ["only in A: chat at 9/s"]
    (pair,) = both  # of two with one key the last counts
    rows = {row.column.name: row for row in pair.rows()}
    assert rows["output_tokens_per_s"].ratio == pytest.approx(1.3)
    assert rows["output_tokens_per_s"].verdict == "better"
    assert rows["ttft_s.p99"].verdict == ""  # the same range
    assert rows["elapsed_s"].ratio is None
    slower = compare.Pair(a=summary(100.0), b=summary(109.0))
    assert {row.verdict for row in slower.rows()} == {""}
    worse = compare.Pair(a=summary(100.0), b=summary(80.0, ttft_s=0.3))
    assert [row.verdict for row in worse.rows()] == ["worse", "", "worse"]


def test_a_comparison_warns_of_what_differs() -> None:
    other = summary(100.0, digest="e", clients=2)
    other["environment"] = {**other["environment"], "versions": {"python": "3.12", "torch": "2.8"}}
    other["target"] = {**other["target"], "device": "cuda"}
    other["is_complete"] = False
    assert compare.Pair(a=summary(100.0), b=other).differences() == [
        "workload digest: d, e",
        "workload clients: 1, 2",
        "target device: cpu, cuda",
        "versions python: 3.11, 3.12",
        "B was cut short",
    ]
    assert compare.Pair(a=summary(1.0), b=summary(2.0)).differences() == []


def test_tables_name_every_figure() -> None:
    console = Console(record=True, width=120, file=io.StringIO())
    report.show(console, summary(100.0))
    report.show_curve(console, [summary(100.0), summary(50.0, rate_per_s=1.0)])
    compare.show(console, compare.Pair(a=summary(100.0), b=summary(150.0)))
    text = console.export_text()
    assert "chat at 2/s: 3 requests" in text
    assert "95.0 to 105.0" in text
    assert "TTFT p99" in text
    assert "better" in text
    assert "1.500" in text


def test_a_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    other = summary(500.0, 9.0, name="decode", rate_per_s=None)
    lines = [summary(150.0, 0.4, rate_per_s=4.0), other, summary(100.0, 0.1)]
    one = plot.curve("a", lines, "ttft", "p99")
    assert one.tokens_per_s == (100.0, 150.0)
    assert one.latency_ms == pytest.approx((100.0, 400.0))
    plot.draw([one], "ttft", "p99", tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text().startswith("<?xml")
    with pytest.raises(ConfigError, match="output must end with"):
        plot.draw([one], "ttft", "p99", tmp_path / "curve.txt")
    with pytest.raises(ConfigError, match="no chat with tpot p99"):
        plot.curve("a", lines, "tpot", "p99")
    with pytest.raises(ConfigError, match="latency must be one of"):
        plot.curve("a", lines, "speed", "p99")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"workload": "fast"}, "workload must be one of"),
        ({"repeat": -1}, "repeat must be from 1 to 1000"),
        ({"scale": 2.0}, "scale must be from 0.001 to 1"),
        ({"scale": float("nan")}, "scale must be from"),
        ({"clients": 0}, "clients must be from 1"),
        ({"num_requests": 513}, "num_requests of decode must be from 0 to 512"),
        ({"rates_per_s": (1.0,)}, "rate belongs to the workload chat"),
        ({"duration_s": 1.0}, "duration belongs to the workload chat"),
        ({"workload": "chat"}, "rate must be given for chat"),
        ({"workload": "chat", "rates_per_s": (0.0,)}, "rate must be from"),
        ({"temperature": 3.0}, "temperature must be from 0 to 2"),
        ({"is_whole": True}, "whole needs --offline"),
        ({"engine": {"block_size": "64"}}, "set needs --offline"),
        ({"mode": "offline", "clients": 2}, "clients must be 1 with --offline"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        BenchOptions(**({"workload": "decode", "mode": "http"} | given))


def test_rates_are_numbers() -> None:
    assert parse_rates("1,2.5") == (1.0, 2.5)
    with pytest.raises(ConfigError, match="rate must be numbers such as 1,2,4, not 'fast'"):
        parse_rates("1,fast")


def test_requests_are_the_first_of_the_list() -> None:
    options = BenchOptions(workload="decode", mode="http", num_requests=3, scale=0.5)
    found = options.requests(49_152, None)
    assert [(len(item.prompt), item.num_tokens) for item in found] == [(64, 128)] * 3
    assert options.num_repetitions == 3
