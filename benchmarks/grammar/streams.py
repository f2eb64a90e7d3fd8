"""What a grammar costs streams that run together: constrained and unconstrained ones in turns, on one stack.

    python benchmarks/grammar/streams.py [--streams 16] [--rounds 5] [--tokens 96] [--up "--cohost"] [--keep]

`text` is a regular expression that allows any line of printable text, so every step needs a mask and
none is forced. `json` is an array of objects: member names are forced. All streams of a round begin at
once and make the same number of tokens. The ratio of tokens per second is the median over the rounds.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grammar.compile import record
from stack_under_test import Stack, stack

SCHEMA: Final = {
    "type": "array",
    "minItems": 200,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
GRAMMARS: Final[dict[str, dict[str, Any]]] = {
    "plain": {"ignore_eos": True},
    "text": {"structured_outputs": {"regex": "[ -~\\n]*\u2603"}},  # what ends it is never drawn
    "json": {"structured_outputs": {"json": SCHEMA}},
}


async def run_streams(to: Stack, kind: str, count: int, num_tokens: int, seed: int) -> float:
    """Tokens per second of `count` streams together."""
    body = {
        "model": to.model,
        "max_tokens": num_tokens,
        "temperature": 0.7,
        **GRAMMARS[kind],
    }
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=to.url, timeout=600, limits=limits) as client:

        async def one(index: int) -> int:
            asked = {**body, "prompt": f"List {index} of people:\n", "seed": seed + index}
            reply = await client.post("/v1/completions", json=asked)
            if reply.is_error:
                raise SystemExit(reply.text)
            return int(reply.json()["usage"]["completion_tokens"])

        began_s = time.perf_counter()
        counts = await asyncio.gather(*(one(index) for index in range(count)))
        return sum(counts) / (time.perf_counter() - began_s)


async def measure(options: argparse.Namespace, to: Stack) -> dict[str, list[float]]:
    """By kind, tokens per second of each round; the first round is for warming up."""
    speeds: dict[str, list[float]] = {kind: [] for kind in GRAMMARS}
    for number in range(options.rounds + 1):
        order = list(GRAMMARS)
        for kind in order[number % 3 :] + order[: number % 3]:
            speed = await run_streams(to, kind, options.streams, options.tokens, 1000 * number)
            if number:
                speeds[kind].append(speed)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--up", default="--cohost", help="arguments of `finback up`, in one string")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    with stack(*options.up.split()) as to:
        speeds = asyncio.run(measure(options, to))
    row: dict[str, Any] = {"benchmark": "grammar_streams", "num_streams": options.streams}
    row |= {"up": options.up, "num_tokens": options.tokens}
    for kind, found in speeds.items():
        ratios = [mine / plain for mine, plain in zip(found, speeds["plain"], strict=True)]
        row[kind] = {
            "tokens_per_s": round(median(found), 1),
            "ratio": round(median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    if options.keep:
        record(row)
    else:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
