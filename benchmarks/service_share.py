"""What of the engine's speed comes through the whole service: `LLM` and a co-hosted stack in turns.

    python benchmarks/service_share.py [--rounds 3] [--streams 1,4,16] [--tokens 128] [--keep]

Both sides run the same list of requests (128 random prompt tokens, `--tokens` answer tokens, temperature 0.6):
`LLM.generate` in a process of its own, and `finback up --cohost` over HTTP, streamed, with its client in
a third process. They take turns, and the share is the median of the pairs' ratios, so that a machine
whose speed drifts favours neither. Next to the times stand the processor times: the service's in sum
and by process, a token; they move less where other work disturbs. The first pair does not count.

Prints a line for each number of streams. With `--keep` one JSON line goes to
`results/service_share.jsonl`; keep runs of a quiet machine only.
"""

import argparse
import asyncio
import json
import platform
import random
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from stack_under_test import Stack, cpu_s, stack

from finback.shared.bench.crew import Crew, Run
from finback.shared.bench.environment import environment
from finback.shared.bench.load import Job, Pace, Sampling

# The share that is wanted of a co-hosted stack, by streams.
WANTED: Final = {1: 0.75, 16: 0.85}
NUM_PROMPT_TOKENS: Final = 128
FIRST_ID, LAST_ID = 1000, 40_000
TIMEOUT_S: Final = 300.0


def jobs(num_streams: int, num_tokens: int, seed: int) -> list[Job]:
    """Prompts that no earlier run has left in the prefix cache."""
    drawn = random.Random(seed)
    return [
        Job(
            index=index,
            prompt=tuple(drawn.randint(FIRST_ID, LAST_ID) for _ in range(NUM_PROMPT_TOKENS)),
            num_tokens=num_tokens,
            seed=seed + index,
            due_s=0.0,
        )
        for index in range(num_streams)
    ]


async def speed(crew: Crew, requests: list[Job]) -> float:
    """Tokens a second of one run; every token must come."""
    pace = Pace(concurrency=0, is_open=False, timeout_s=TIMEOUT_S)
    run: Run = await crew.run(requests, Sampling(temperature=0.6), pace, lambda *_: None)
    wanted = sum(job.num_tokens for job in requests)
    found = sum(outcome.num_tokens for outcome in run.outcomes)
    errors = {outcome.error for outcome in run.outcomes if outcome.error}
    if found != wanted or errors:
        raise SystemExit(f"{found} of {wanted} tokens came back; {errors}")
    return wanted / run.elapsed_s


async def pair(
    offline: Crew, service: Crew, pids: dict[str, int], requests: list[Job], *, is_swapped: bool
) -> dict[str, Any]:
    """Both sides once, in an order that changes from pair to pair."""
    found: dict[str, Any] = {}
    num_tokens = sum(job.num_tokens for job in requests)
    for name in ("service", "offline") if is_swapped else ("offline", "service"):
        crew, of = (offline, {"": offline.pids[0]}) if name == "offline" else (service, pids)
        before = {part: cpu_s(pid) for part, pid in of.items()}
        found[name] = await speed(crew, requests)
        found[f"{name}_cpu_ms"] = {
            part: 1e3 * (cpu_s(pid) - before[part]) / num_tokens for part, pid in of.items()
        }
    return found


def summary(num_streams: int, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the pairs."""
    parts = pairs[0]["service_cpu_ms"]
    return {
        "num_streams": num_streams,
        "wanted": WANTED.get(num_streams),
        "share": round(median(one["service"] / one["offline"] for one in pairs), 3),
        "shares": [round(one["service"] / one["offline"], 3) for one in pairs],
        "offline_tokens_per_s": round(median(one["offline"] for one in pairs), 1),
        "service_tokens_per_s": round(median(one["service"] for one in pairs), 1),
        "offline_cpu_ms_per_token": round(median(o["offline_cpu_ms"][""] for o in pairs), 2),
        "service_cpu_ms_per_token": {
            part: round(median(one["service_cpu_ms"][part] for one in pairs), 2) for part in parts
        },
    }


async def measure(under_test: Stack, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All numbers of streams, pair after pair."""
    http = {"kind": "open", "mode": "http", "url": under_test.url, "model": under_test.model}
    llm = {"kind": "open", "mode": "offline", "model": "embedded", "is_whole": True, "options": {}}
    found = []
    seed = int(time.time())
    async with (
        Crew(llm, 1) as offline,
        Crew({**http, "key": "", "has_ids": False}, 1) as service,
    ):
        for num_streams in map(int, options.streams.split(",")):
            pairs = []
            for number in range(options.rounds + 1):
                seed += 1000
                requests = jobs(num_streams, options.tokens, seed)
                is_swapped = bool(number % 2)
                pairs.append(
                    await pair(offline, service, under_test.pids, requests, is_swapped=is_swapped)
                )
            found.append(summary(num_streams, pairs[1:]))
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--up", default="--cohost", help="arguments of `finback up`, in one string")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    about = environment()
    with stack(*options.up.split()) as under_test:
        rows = asyncio.run(measure(under_test, options))
    record = {
        "benchmark": "service_share",
        "unix_s": int(time.time()),
        "num_tokens": options.tokens,
        "rounds": options.rounds,
        "up": options.up,
        "python": platform.python_version(),
        "environment": about,
        "rows": rows,
    }
    if options.keep:
        results = Path(__file__).parent / "results" / "service_share.jsonl"
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
