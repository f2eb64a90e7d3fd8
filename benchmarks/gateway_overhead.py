"""What the gateway, the router and the bus cost without a model.

Starts a NATS server, the real router, the echo engine (64 tokens streamed to every request) and a
gateway, then offers load from another process: first at 100 requests/s, then at rising rates, to
find the highest that holds a p99 of 50 ms to the first token. One JSON line goes to results/.

    python benchmarks/gateway_overhead.py [--seconds 10] [--step-ms 0] [--only-base]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / ".src")]

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

BASE_RATE: Final = 100
TOKENS: Final = 64
P99_LIMIT_MS: Final = 50.0


def offer(stack: GatewayStack, rate: float, seconds: float) -> dict[str, Any]:
    """One run of the load generator, with the CPU that each process used meanwhile."""
    before = {name: cpu_s(process.pid) for name, process in stack.processes.items()}
    begun_s = time.monotonic()
    command = [sys.executable, str(ROOT / "benchmarks" / "load_generator.py")]
    arguments = ["127.0.0.1", str(stack.port), str(rate), str(seconds), str(TOKENS)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    elapsed_s = time.monotonic() - begun_s
    result: dict[str, Any] = json.loads(done.stdout)
    result["cpu"] = {
        name: round((cpu_s(process.pid) - before[name]) / elapsed_s, 3)
        for name, process in stack.processes.items()
    }
    print(json.dumps(result), flush=True)
    return result


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def holds(result: dict[str, Any]) -> bool:
    """Were all answers whole, and the first tokens in time."""
    return not result["errors"] and result["ttft_p99_ms"] < P99_LIMIT_MS


def highest_rate(stack: GatewayStack, seconds: float) -> float:
    """Double until it breaks, then halve the gap three times."""
    good, rate = 0.0, 2.0 * BASE_RATE
    while holds(offer(stack, rate, seconds)):
        good, rate = rate, rate * 1.5
    bad = rate
    good = good or BASE_RATE
    for _ in range(3):
        middle = (good + bad) / 2
        if holds(offer(stack, middle, seconds)):
            good = middle
        else:
            bad = middle
    return good


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--only-base", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(folder=Path(folder) / "nats")
        server.start()
        env = {"ECHO_STEP_MS": str(options.step_ms), "FINBACK_LOG_LEVEL": "warning"}
        stack = GatewayStack(server.url, "bench", Path(folder), env)
        try:
            stack.start()
            base = offer(stack, BASE_RATE, options.seconds)
            best = 0.0 if options.only_base else highest_rate(stack, options.seconds / 2)
        finally:
            stack.stop()
            server.kill()
    line = {
        "benchmark": "gateway_overhead",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        ).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "num_tokens": TOKENS,
        "step_ms": options.step_ms,
        "base": base,
        "highest_rate_p99_under_50_ms": best,
    }
    results = ROOT / "benchmarks" / "results" / "gateway_overhead.jsonl"
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as out:
        out.write(json.dumps(line) + "\n")
    print(
        f"at {BASE_RATE} requests/s: p50 {base['ttft_p50_ms']} ms, p99 {base['ttft_p99_ms']} ms "
        f"to the first token, errors {base['errors']}; highest rate with p99 under "
        f"{P99_LIMIT_MS:g} ms: {best:g} requests/s"
    )


if __name__ == "__main__":
    main()
