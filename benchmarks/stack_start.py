"""Start a whole stack and weigh it: time to ready, time to first token, memory of every process.

    python benchmarks/stack_start.py [--rounds 3] [--up="--separate --drafting"]

Time to ready is that of `finback up --detach`, the command's own start included. The first token is
that of a short prompt over HTTP straight after ready, then of a second one. Memory is PSS from
smaps_rollup, so that pages shared between processes count once. Appends a JSON line to
`benchmarks/results/stack_start.jsonl`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

FINBACK = str(Path(sys.executable).with_name("finback"))
BODY = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 16,
    "temperature": 0,
    "stream": True,
}


def pss_mb(pid: int) -> float:
    """Proportional set size of one process, MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def first_token_s(base_url: str, model: str) -> float:
    """Seconds from sending a short chat request to its first content."""
    started = time.perf_counter()
    body = {"model": model, **BODY}
    with httpx.stream("POST", f"{base_url}/v1/chat/completions", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["delta"].get("content"):
                return time.perf_counter() - started
    raise SystemExit("the answer had no content")


def one_round(arguments: list[str]) -> dict[str, Any]:
    """Up, ask twice, weigh, down."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = ["--run-dir", folder]
        started = time.perf_counter()
        subprocess.run([FINBACK, "up", "--detach", *run_dir, *arguments], check=True)
        ready_s = time.perf_counter() - started
        try:
            answer = subprocess.run(
                [FINBACK, "status", "--json", *run_dir], check=True, capture_output=True
            )
            status = json.loads(answer.stdout)
            tokens = [first_token_s(status["http"], status["model"]) for _ in range(2)]
            memory = weigh(status, folder)
        finally:
            subprocess.run([FINBACK, "down", *run_dir], check=True)
    return {"ready_s": ready_s, "first_s": tokens[0], "second_s": tokens[1], "pss_mb": memory}


def weigh(status: dict[str, Any], run_dir: str) -> dict[str, float]:
    """PSS a process: the services, and whatever else runs on this run directory."""
    names = {int(entry["pid"]): name for name, entry in status["services"].items()}
    for process in psutil.process_iter(["pid", "cmdline", "name"]):
        if run_dir in " ".join(process.info["cmdline"] or ()):
            names.setdefault(process.info["pid"], process.info["name"])
    return {name: round(pss_mb(pid), 1) for pid, name in names.items()}


def main() -> None:
    """Run the rounds and report medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--up", default="", help="arguments of `finback up`, in one string")
    options = parser.parse_args()
    rounds = [one_round(options.up.split()) for _ in range(options.rounds)]
    record = {
        "unix_s": int(time.time()),
        "command": " ".join(["benchmarks/stack_start.py", *sys.argv[1:]]),
        **{
            key: round(median(one[key] for one in rounds), 3)
            for key in ("ready_s", "first_s", "second_s")
        },
        "pss_mb": rounds[-1]["pss_mb"],
        "pss_sum_mb": round(sum(rounds[-1]["pss_mb"].values()), 1),
    }
    print(json.dumps(record, indent=2))
    results = Path(__file__).parent / "results" / "stack_start.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
