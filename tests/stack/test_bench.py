"""`finback bench` as a user runs it: against the stack over both ways, offline, and interrupted."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from support.stack import COMMAND, Stack, finback

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
SMALL = ("--scale", "0.1", "--repeat", "2")


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def check(lines: list[dict[str, Any]], num_tokens: int, *, has_limit: bool) -> dict[str, Any]:
    """Two repetitions and a summary that adds up; the summary."""
    assert [line["kind"] for line in lines] == ["repetition", "repetition", "summary"]
    for line in lines[:2]:
        found = line["figures"]
        assert found["num_whole"] == found["num_requests"]
        assert found["output_tokens"] == num_tokens
        assert found["num_failed"] == 0
        assert 0 < found["ttft_s"]["p50"] <= found["e2e_s"]["max"] <= found["elapsed_s"] + 1e-6
        assert found["cpu_ms_per_token"] > 0
        assert found["peak_rss_bytes"] > 2**26
        assert ("limit" in found) is has_limit
        assert found["entropy"]["num_tokens"] == num_tokens
    summary = lines[2]
    assert summary["is_complete"]
    assert summary["repetitions"] == 2
    assert summary["probe"]["surprisal_bits"] > 0
    assert (summary["ceilings"] is not None) is has_limit
    assert summary["environment"]["versions"]["finback"]
    spread = summary["figures"]["output_tokens_per_s"]
    assert spread["low"] <= spread["median"] <= spread["high"]
    return summary


def test_against_the_stack_over_http(stack: Stack) -> None:
    options = (*SMALL, "--drafting", "--targets", "ttft=1e3s", "--no-limit", "--json")
    done = stack.command("bench", "latency", *options, timeout_s=240)
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    summary = check(lines, 26, has_limit=False)
    assert summary["target"]["mode"] == "http"
    of = summary["figures"]
    parts = [of[name]["median"] for name in of if name.startswith("cpu_ms_per_token_of.")]
    assert len(parts) == 9  # seven services, NATS and the supervisor
    assert summary["figures"]["goodput.share"]["median"] == 1.0
    assert [line["figures"]["cached_tokens"] for line in lines[:2]] == [0, 0]


def test_against_the_stack_over_nats_with_two_clients(stack: Stack) -> None:
    options: tuple[str, ...] = (
        "--nats",
        "--clients",
        "2",
        "--rate",
        "2,4",
        "--num-requests",
        "3",
        "--no-limit",
    )
    options += (*SMALL, "--drafting", "--json")
    done = stack.command("bench", "chat", *options, timeout_s=240)
    assert done.returncode == 0, done.stderr
    summaries = [line for line in lines_of(done.stdout) if line["kind"] == "summary"]
    assert [line["workload"]["rate_per_s"] for line in summaries] == [2.0, 4.0]
    assert len({line["workload"]["digest"] for line in summaries}) == 1
    assert summaries[0]["figures"]["num_whole"]["median"] == 3


def test_prefixes_are_shared_within_a_repetition_only(stack: Stack) -> None:
    """Two of the first five prompts of `agent` share a prefix: its full blocks are hits, once."""
    options: tuple[str, ...] = ("--scale", "0.03", "--num-requests", "5", "--concurrency", "1")
    options += ("--repeat", "2", "--drafting", "--no-limit", "--json")
    done = stack.command("bench", "agent", *options, timeout_s=240)
    assert done.returncode == 0, done.stderr
    lines = lines_of(done.stdout)
    assert [line["figures"]["cached_tokens"] for line in lines[:2]] == [128, 128]
    assert lines[0]["mark"] != lines[1]["mark"]


def test_a_stack_that_drafts_is_not_benched_by_mistake(stack: Stack) -> None:
    done = stack.command("bench", "latency", *SMALL)
    assert done.returncode == 2
    assert "drafting on: give --drafting" in done.stderr


def test_what_the_stack_refuses_is_told(stack: Stack) -> None:
    """8,192 prompt tokens leave no room for an answer in this model's context."""
    options = ("--num-requests", "1", "--repeat", "1", "--drafting", "--no-limit")
    done = stack.command("bench", "prefill", *options, timeout_s=240)
    assert done.returncode == 1
    assert "maximum context length is" in done.stderr


def test_offline_and_compared_with_itself(tmp_path: Path) -> None:
    output = str(tmp_path / "offline.jsonl")
    options = ("--offline", *SMALL, "--output", output)
    done = finback("bench", "latency", *options, timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert "of the limit" in done.stdout
    lines = lines_of(Path(output).read_text())
    summary = check(lines, 26, has_limit=True)
    assert summary["ceilings"]["copy_bytes_per_s"] > 1e8
    assert lines[0]["figures"]["limit"]["limit_s"] > 0
    assert summary["workload"]["output_tokens"] == 26
    compared = finback("bench", "compare", output, output, "--json")
    (pair,) = json.loads(compared.stdout)["pairs"]
    assert pair["differences"] == []
    assert {figure["ratio"] for figure in pair["figures"].values()} <= {1.0, None}


def test_an_interrupted_bench_keeps_what_it_measured(stack: Stack, tmp_path: Path) -> None:
    output = tmp_path / "cut.jsonl"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FINBACK_")}
    options = ["--run-dir", str(stack.run_dir), "--drafting", "--scale", "0.1", "--repeat", "1000"]
    options += ["--no-limit"]
    process = subprocess.Popen(
        [*COMMAND, "bench", "latency", *options, "--output", str(output)],
        env=clean,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (output.exists() and len(output.read_text().splitlines()) >= 2):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "cut short" in told
    lines = lines_of(output.read_text())
    assert lines[-1]["kind"] == "summary"
    assert not lines[-1]["is_complete"]
    assert lines[-1]["repetitions"] >= 2
