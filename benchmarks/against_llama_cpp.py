"""Finback's engine against llama.cpp on one GGUF file, in turns within one run.

    python benchmarks/against_llama_cpp.py [--rounds 3] [--threads 2] [--set deterministic=true]
                                           [--case 'prefill 512'] [--profile]

Every workload is run by both, one after the other, `--rounds` times after one that does not count; the
ratio is the median of the pairwise ratios, so that a machine whose speed drifts does not favour either.
Prints a table of ratios (and with `--profile` where Finback's steps spend their time) and appends one
JSON line to `benchmarks/results/against_llama_cpp.jsonl`.

Needs llama-cpp-python, built from source for this processor:
`pip install --no-binary llama-cpp-python llama-cpp-python`. With gcc 12 and AMX see llama_cpp_gcc12.h.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from finback.kernels.cpu_features import chosen
from finback.shared.models.source import embedded_path

HERE: Final = Path(__file__).parent

# What we want to reach, and aim at, with 2 threads and SmolLM2-135M Q4_1.
CASES: Final[dict[str, tuple[float, float] | None]] = {
    "decode 1 64": (1.1, 1.3),
    "decode 4 64": None,
    "decode 8 64": (1.6, 2.0),
    "decode 16 64": (1.8, 2.2),
    "decode 32 64": None,
    "prefill 512": (5.0, 6.0),
    "prefill 2048": (4.0, 5.0),
}


class Side:
    """One engine in its own process."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.version = str(self._answer()["version"])

    def ask(self, line: str) -> dict[str, Any]:
        """Send one line, wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def run(self, case: str) -> float:
        """Tokens per second of one workload."""
        return float(self.ask(case)["tokens_per_s"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        code = self._process.wait(30)
        self._errors.seek(0)
        tail = "".join(self._errors.readlines()[-5:])
        hint = "; see benchmarks/llama_cpp_gcc12.h" if code == -11 else ""
        raise SystemExit(f"{tail}{self._process.args!r} ended with {code}{hint}")


def compare(ours: Side, theirs: Side, case: str, rounds: int) -> dict[str, Any]:
    """Both in turns; the first pair does not count."""
    pairs = [(ours.run(case), theirs.run(case)) for _ in range(rounds + 1)][1:]
    return {
        "finback": round(median(a for a, _ in pairs), 1),
        "llama.cpp": round(median(b for _, b in pairs), 1),
        "ratio": round(median(a / b for a, b in pairs), 2),
        "ratio_of_best": round(max(a for a, _ in pairs) / max(b for _, b in pairs), 2),
        "ratios": [round(a / b, 2) for a, b in pairs],
    }


def table_line(case: str, row: dict[str, Any]) -> str:
    """One line for people."""
    wanted = CASES.get(case)
    goal = f"{wanted[0]:5.1f} {wanted[1]:5.1f}" if wanted else f"{'-':>5} {'-':>5}"
    return (
        f"{case:14} {row['finback']:9.1f} {row['llama.cpp']:9.1f} {row['ratio']:6.2f}"
        f" {row['ratio_of_best']:6.2f}  {goal}  {row['ratios']}"
    )


def llama_features() -> str:
    """What this build of llama.cpp says it uses."""
    code = (
        "import llama_cpp as l; l.llama_backend_init();"
        "print(l.llama_print_system_info().decode().strip())"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return found.stdout.strip()


def main() -> None:
    """Run all cases and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", help="only these, for example 'decode 1 64'")
    parser.add_argument("--set", action="append", default=[], help="a Finback setting, key=value")
    parser.add_argument("--profile", action="store_true", help="print milliseconds a step by phase")
    options = parser.parse_args()
    model = str(embedded_path())
    extra = [*(["--profile"] if options.profile else []), *options.set]
    ours = Side("finback_peer.py", model, str(options.threads), *extra)
    theirs = Side("llama_cpp_peer.py", model, str(options.threads))
    features = llama_features()
    versions = f"{ours.version} (kernel set {chosen().name}) against {theirs.version}: {features}"
    print(versions, flush=True)
    print(f"{'tokens/s':14} {'Finback':>9} {'llama.cpp':>9} {'ratio':>6} {'best':>6}  reach   aim")
    rows, profiles = {}, {}
    for case in options.case or CASES:
        rows[case] = compare(ours, theirs, case, options.rounds)
        print(table_line(case, rows[case]), flush=True)
        if options.profile:
            profiles[case] = ours.ask("profile")
            for kind, phases in profiles[case].items():
                print(f"    {kind:6} {phases} ms", flush=True)
    ours.close()
    theirs.close()
    record = {
        "unix_s": int(time.time()),
        "command": " ".join(["benchmarks/against_llama_cpp.py", *sys.argv[1:]]),
        "device": f"{platform.machine()}, {options.threads} threads, kernel set {chosen().name}",
        "torch": torch.__version__,
        "llama_cpp_python": theirs.version,
        "llama_cpp_features": features,
        "tokens_per_s": rows,
        **({"profile_ms": profiles} if profiles else {}),
    }
    results = HERE / "results" / "against_llama_cpp.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
