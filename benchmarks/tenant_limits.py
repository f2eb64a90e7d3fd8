"""What a tenant's limits cost a request: one key with limits and one without, in turns.

A real gateway and router on a real NATS server, the echo engine behind them, one request at a time.

    .venv/bin/python benchmarks/tenant_limits.py
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from finback.services.supervisor import key_file
from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

ROUNDS = 400
BODY = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "one two three"}],
    "max_tokens": 4,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        keys = folder / "keys.jsonl"
        free, _ = key_file.create(keys, "free")
        limited, _ = key_file.create(
            keys, "limited", requests_per_min=10**6, tokens_per_min=10**9, max_concurrency=64
        )
        server = NatsServer(folder=folder / "nats")
        server.start()
        stack = GatewayStack(server.url, "cost", folder, {"FINBACK_API_KEYS_FILE": str(keys)})
        try:
            measure(stack.start(), {"without limits": free, "with limits": limited})
        finally:
            stack.stop()
            server.stop()


def measure(stack: GatewayStack, keys: dict[str, str]) -> None:
    """Print the median and the 99th percentile of each, and the ratio of medians."""
    times_ms: dict[str, list[float]] = {name: [] for name in keys}
    with httpx.Client(base_url=stack.url) as client:
        for at in range(ROUNDS + 20):
            for name, key in keys.items():
                begun_s = time.perf_counter()
                headers = {"authorization": f"Bearer {key}"}
                client.post("/v1/chat/completions", json=BODY, headers=headers).raise_for_status()
                if at >= 20:
                    times_ms[name].append((time.perf_counter() - begun_s) * 1000)
    for name, values in times_ms.items():
        p99 = statistics.quantiles(values, n=100)[98]
        print(f"{name:15} p50 {statistics.median(values):.2f} ms, p99 {p99:.2f} ms")
    free, limited = (statistics.median(values) for values in times_ms.values())
    print(f"ratio of medians {limited / free:.3f}")


if __name__ == "__main__":
    main()
