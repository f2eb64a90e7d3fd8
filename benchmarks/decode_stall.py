"""For how long a long prompt holds up answers that run: gaps between tokens with and without it.

    python benchmarks/decode_stall.py [--rounds 3] [--streams 4] [--prompt 2048] [--keep]
                                      [--up='--cohost' --up='--cohost --set max_stall_ms=0']

Every `--up` is a stack of its own (a layout or setting to compare); they take turns. In a round each
streams `--streams` answers of 200 tokens twice: alone, and with a prompt of `--prompt` tokens that comes
when they run. Shown are the median and the 99th percentile of the gaps between arrivals of one stream,
taken while the prompt is computed, and the prompt's time to its first token.

Prints a line for each stack. With `--keep` one JSON line goes to `results/decode_stall.jsonl`; keep runs of
a quiet machine only.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from stack_under_test import Stack, stack

from finback.shared.bench.environment import environment
from finback.shared.bench.http_client import HttpClient
from finback.shared.bench.load import Job, Sampling
from finback.shared.bench.stats import percentile
from finback.shared.bench.track import Track

NUM_TOKENS = 200
HEAD_START_S = 0.5


def job(seed: int, num_prompt: int, num_tokens: int) -> Job:
    """A prompt of its own, for the prefix cache must not have it."""
    drawn = random.Random(seed)
    prompt = tuple(drawn.randint(1000, 40_000) for _ in range(num_prompt))
    return Job(index=0, prompt=prompt, num_tokens=num_tokens, seed=seed, due_s=0.0)


async def follow(client: HttpClient, asked: Job) -> list[float]:
    """When the tokens of one answer arrived."""
    track = Track(0, asked.num_tokens, time.monotonic())
    await client.ask(asked, Sampling(temperature=0.6), track)
    outcome = track.outcome(0.0)
    if outcome.error or outcome.first_s is None:
        raise SystemExit(f"a stream failed: {outcome.error}")
    times = [outcome.first_s]
    for gap_s in outcome.gaps_s:
        times.append(times[-1] + gap_s)
    return times


async def one_run(to: Stack, seed: int, options: argparse.Namespace, *, has_prompt: bool) -> Any:
    """(ascending gaps in ms while it matters, seconds to the prompt's first token or None)."""
    client = HttpClient(url=to.url, model=to.model, has_ids=False)
    try:
        running = [
            asyncio.create_task(follow(client, job(seed + at, 32, NUM_TOKENS)))
            for at in range(options.streams)
        ]
        await asyncio.sleep(HEAD_START_S)
        start_s, end_s, first_s = time.monotonic(), float("inf"), None
        if has_prompt:
            arrived = await follow(client, job(seed + 500, options.prompt, 2))
            end_s, first_s = arrived[0], arrived[0] - start_s
        streams = await asyncio.gather(*running)
    finally:
        await client.close()
    gaps_ms = [
        1e3 * (after - before)
        for times in streams
        for before, after in itertools.pairwise(times)
        if after > start_s and before < end_s
    ]
    return sorted(gaps_ms), first_s


async def measure(stacks: dict[str, Stack], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All stacks in turns; medians over the rounds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in stacks}
    seed = int(time.time())
    for number in range(options.rounds + 1):
        for name, to in stacks.items():
            seed += 1000
            alone, _ = await one_run(to, seed, options, has_prompt=False)
            beside, first_s = await one_run(to, seed + 100, options, has_prompt=True)
            if number:
                found[name].append(
                    {
                        "alone_p50_ms": percentile(alone, 50),
                        "alone_p99_ms": percentile(alone, 99),
                        "beside_p50_ms": percentile(beside, 50),
                        "beside_p99_ms": percentile(beside, 99),
                        "beside_most_ms": beside[-1],
                        "prompt_ttft_s": first_s,
                    }
                )
    rows = []
    for name, rounds in found.items():
        middle = {key: round(median(one[key] for one in rounds), 3) for key in rounds[0]}
        rows.append({"up": name, **middle})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--up", action="append", help="arguments of `finback up`, in one string")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    about = environment()
    wanted = options.up or ["--cohost", "--cohost --set max_stall_ms=0"]
    with ExitStack() as opened:
        stacks = {given: opened.enter_context(stack(*given.split())) for given in wanted}
        rows = asyncio.run(measure(stacks, options))
    record = {
        "benchmark": "decode_stall",
        "unix_s": int(time.time()),
        "streams": options.streams,
        "prompt": options.prompt,
        "rounds": options.rounds,
        "environment": about,
        "rows": rows,
    }
    if options.keep:
        results = Path(__file__).parent / "results" / "decode_stall.jsonl"
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
