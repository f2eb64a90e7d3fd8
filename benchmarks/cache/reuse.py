"""Time to first token of a prompt whose first 2,048 tokens were seen before, by where their KV lies.

    python benchmarks/cache/reuse.py [--rounds 5] [--up="--separate"]

A stack with the embedded model, alone with one client. Each round has a prefix of its own (random
ids), asked for with other last tokens each time: again (device pool); after a kill -9 of the workers,
which empties their pools (host tier); after `finback down`, an end of all shared
memory, and `up` (file tier). Between any two of
them a prompt of the same length is new, so that both feel the same machine: ratios are of medians of
the same phase. Appends a JSON line to `benchmarks/results/cache_reuse.jsonl`.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

FINBACK: Final = str(Path(sys.executable).with_name("finback"))
PREFIX_TOKENS: Final = 2048
LAST_TOKENS: Final = 4
SHM: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
TIMEOUT_S: Final = 180
# Blocks are stored behind the steps, and spilt to files behind that.
SETTLE_S: Final = 1.0


def finback(*arguments: str, check: bool = True) -> str:
    """One command; what it printed."""
    done = subprocess.run(
        [FINBACK, *arguments], check=check, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    return done.stdout


def ids(seed: str, count: int) -> list[int]:
    """Random ids of plain text tokens."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def ask(http: str, prompt: list[int]) -> tuple[float, int]:
    """(milliseconds to the first token, cached prompt tokens)."""
    body = {
        "model": "gpt-4o",
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_ms, cached = 0.0, 0
    started = time.perf_counter()
    with httpx.stream("POST", f"{http}/completions", json=body, timeout=TIMEOUT_S) as reply:
        if reply.status_code != 200:
            raise SystemExit(reply.read().decode())
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices") and not first_ms:
                first_ms = 1e3 * (time.perf_counter() - started)
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    return first_ms, cached


class OneStack:
    """A stack on a run directory that outlives it."""

    def __init__(self, run_dir: str, arguments: list[str]) -> None:
        self._run_dir = ("--run-dir", run_dir)
        self._arguments = arguments

    def up(self) -> str:
        """Start it; its address."""
        finback("up", "--detach", *self._run_dir, *self._arguments)
        ask(self.http, ids("warm", 700))
        return self.http

    @property
    def http(self) -> str:
        """Base of the API."""
        address = str(self._status()["http"])
        return address if address.endswith("/v1") else f"{address}/v1"

    def down(self) -> None:
        """Stop it."""
        finback("down", *self._run_dir)

    def kill_workers(self) -> None:
        """kill -9 every engine, and wait for its successor."""
        before = self._status()["services"]
        names = [name for name in ("prefill", "decode") if name in before]
        for pid in {int(before[name]["pid"]) for name in names}:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            now = self._status()["services"]
            if all(
                now[name]["state"] == "serving"
                and now[name]["instance"] != before[name]["instance"]
                for name in names
            ):
                ask(self.http, ids("warm", 700))
                return
            time.sleep(0.3)
        raise SystemExit("the workers did not come back")

    def _status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(finback("status", "--json", *self._run_dir, check=False))
        return told


Row = tuple[float, int]
"""Milliseconds, cached tokens."""


def run(stack: OneStack, num_rounds: int, shm: str) -> dict[str, tuple[list[Row], list[Row]]]:
    """By tier: rows of prompts seen before, and of new ones that were asked between them."""
    prefixes = [ids(f"prefix {index}", PREFIX_TOKENS) for index in range(num_rounds)]
    for prefix in prefixes:
        ask(stack.http, prefix + ids("first", LAST_TOKENS))

    def phase(tier: str) -> tuple[list[Row], list[Row]]:
        http, seen, new = stack.http, list[Row](), list[Row]()
        for at, prefix in enumerate(prefixes):
            new.append(ask(http, ids(f"{tier} {at}", PREFIX_TOKENS + LAST_TOKENS)))
            time.sleep(SETTLE_S)  # what was computed is written back
            seen.append(ask(http, prefix + ids(f"last {tier} {at}", LAST_TOKENS)))
        return seen, new

    found = {"device": phase("device")}
    stack.kill_workers()
    found["host"] = phase("host")
    stack.down()
    shutil.rmtree(shm, ignore_errors=True)  # as after a restart of the machine
    stack.up()
    found["file"] = phase("file")
    return found


def summary(rows: list[Row]) -> dict[str, float]:
    """Of one kind of prompt in one phase."""
    return {
        "median_ms": round(median(ms for ms, _ in rows), 1),
        "worst_ms": round(max(ms for ms, _ in rows), 1),
        "least_cached_tokens": min(cached for _, cached in rows),
    }


def main() -> None:
    """Run, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--up", default="", help="arguments of `finback up`, in one string")
    parser.add_argument("--files", default="", help="folder of the file tier, on the disk to try")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FINBACK_CACHE_DIR"] = options.files or f"{folder}/kv"
        os.environ["FINBACK_SHM_DIR"] = shm = tempfile.mkdtemp(dir=SHM)
        stack = OneStack(folder, options.up.split())
        stack.up()
        try:
            found = run(stack, options.rounds, shm)
        finally:
            stack.down()
            shutil.rmtree(shm, ignore_errors=True)
    record: dict[str, Any] = {
        "unix_s": int(time.time()),
        "command": " ".join(["benchmarks/cache/reuse.py", *sys.argv[1:]]),
        "prefix_tokens": PREFIX_TOKENS,
        "rounds": options.rounds,
    }
    for tier, (seen, new) in found.items():
        ratio = median(ms for ms, _ in seen) / median(ms for ms, _ in new)
        record[tier] = {
            "seen": summary(seen),
            "cold": summary(new),
            "ratio_to_cold": round(ratio, 3),
        }
    print(json.dumps(record, indent=2))
    results = Path(__file__).parents[1] / "results" / "cache_reuse.jsonl"
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
