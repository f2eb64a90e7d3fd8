"""Do copies to the host tier hold up answers that run? Time between tokens with and without them.

    python benchmarks/cache/write_back.py [--rounds 6] [--streams 4] [--tokens 256]

One stack with the embedded model. Each round runs several streams with prompts of 500 tokens of their
own; rounds alternate between traffic class `chat`, whose blocks are kept, and `batch`, whose are not,
so that both feel the same machine. Appends a JSON line to `benchmarks/results/cache_write_back.jsonl`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import httpx

sys.path[:0] = [str(Path(__file__).parents[1])]

from stack_under_test import stack

PROMPT_TOKENS: Final = 500
TIMEOUT_S: Final = 300.0


async def stream(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[float]:
    """Milliseconds between the tokens of one stream."""
    gaps, last = list[float](), 0.0
    async with client.stream("POST", url, json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit((await reply.aread()).decode())
        async for line in reply.aiter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:]).get("choices"):
                continue
            now = time.perf_counter()
            if last:
                gaps.append(1e3 * (now - last))
            last = now
    return gaps


async def run(url: str, model: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Gaps by traffic class."""
    found: dict[str, list[float]] = {"chat": [], "batch": []}
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for number in range(2 * options.rounds + 1):
            name = ("chat", "batch")[number % 2]
            bodies = []
            for at in range(options.streams):
                draw = random.Random(f"{number} {at}")
                bodies.append(
                    {
                        "model": model,
                        "prompt": [draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)],
                        "max_tokens": options.tokens,
                        "ignore_eos": True,
                        "temperature": 0,
                        "stream": True,
                        "traffic_class": name,
                    }
                )
            gaps = await asyncio.gather(*(stream(client, url, body) for body in bodies))
            if number:  # the first one warms up
                found[name] += [gap for one in gaps for gap in one]
    return found


def summary(gaps: list[float]) -> dict[str, float]:
    """Of all gaps of a class."""
    ordered = sorted(gaps)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    mean = sum(ordered) / len(ordered)
    return {"mean_ms": round(mean, 2), "p50_ms": at(0.5), "p99_ms": at(0.99), "count": len(ordered)}


def main() -> None:
    """Run, print and append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each class")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--up", default="", help="arguments of `finback up`, in one string")
    options = parser.parse_args()
    with stack(*options.up.split()) as made:
        found = asyncio.run(run(f"{made.url}/v1/completions", made.model, options))
    kept, not_kept = summary(found["chat"]), summary(found["batch"])
    record = {
        "unix_s": int(time.time()),
        "command": " ".join(["benchmarks/cache/write_back.py", *sys.argv[1:]]),
        "kept": kept,
        "not_kept": not_kept,
        "mean_ratio": round(kept["mean_ms"] / not_kept["mean_ms"], 3),
        "p99_ratio": round(kept["p99_ms"] / not_kept["p99_ms"], 3),
    }
    print(json.dumps(record, indent=2))
    results = Path(__file__).parents[1] / "results" / "cache_write_back.jsonl"
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
