"""Finback's engine against llama.cpp on one GGUF file, in turns within one run.

    python benchmarks/against_llama_cpp.py [--rounds 3] [--threads 2] [--set deterministic=true]

Every workload is run by both, one after the other, `--rounds` times; the ratio is the median of the
pairwise ratios, so that a machine whose speed drifts does not favour either. Needs llama-cpp-python.
Prints a table and appends one JSON line to `benchmarks/results/against_llama_cpp.jsonl`.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from finback.shared.models.source import embedded_path

HERE = Path(__file__).parent
CASES = (
    "decode 1 64",
    "decode 4 64",
    "decode 8 64",
    "decode 16 64",
    "decode 32 64",
    "prefill 512",
    "prefill 2048",
)


class Side:
    """One engine in its own process."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.version = str(self._answer()["version"])

    def run(self, case: str) -> float:
        """Tokens per second of one workload."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self._answer()["tokens_per_s"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"{self._process.args!r} ended; run it by hand to see why")


def main() -> None:
    """Run all cases and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", help="only these, for example 'decode 1 64'")
    parser.add_argument("--set", action="append", default=[], help="a Finback setting, key=value")
    options = parser.parse_args()
    model = str(embedded_path())
    ours = Side("finback_peer.py", model, str(options.threads), *options.set)
    theirs = Side("llama_cpp_peer.py", model, str(options.threads))
    rows = {}
    for case in options.case or CASES:
        pairs = [(ours.run(case), theirs.run(case)) for _ in range(options.rounds + 1)][1:]
        rows[case] = {
            "finback": round(median(a for a, _ in pairs), 1),
            "llama.cpp": round(median(b for _, b in pairs), 1),
            "ratio": round(median(a / b for a, b in pairs), 2),
            "ratios": [round(a / b, 2) for a, b in pairs],
        }
        print(f"{case:14} {rows[case]}", flush=True)
    ours.close()
    theirs.close()
    record = {
        "unix_s": int(time.time()),
        "command": " ".join(["benchmarks/against_llama_cpp.py", *sys.argv[1:]]),
        "device": f"{platform.machine()}, {options.threads} threads",
        "torch": torch.__version__,
        "llama_cpp_python": theirs.version,
        "tokens_per_s": rows,
    }
    results = HERE / "results" / "against_llama_cpp.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
