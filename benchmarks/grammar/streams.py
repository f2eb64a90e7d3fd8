"""What a grammar costs streams that run together: constrained and unconstrained ones in turns, on one stack.

    python benchmarks/grammar/streams.py [--streams 16] [--rounds 5] [--tokens 96] [--up "--cohost"]
        [--kinds plain,text,json] [--processes] [--keep]

`text` is a regular expression that allows any line of printable text, so every step needs a mask and
none is forced. `json` is an array of objects: member names are forced. All streams of a round begin at
once and make the same number of tokens. The ratio of tokens per second is the median over the rounds.

`--processes` adds milliseconds of processor time by process for each token of a stream (a step of all
streams, where none is forced), and of what they are more than `plain`.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grammar.compile import record
from process_times import ProcessTimes
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


@dataclass(slots=True)
class Found:
    """Of one kind: tokens per second of each round, and seconds of processor time by process in all."""

    speeds: list[float] = field(default_factory=list)
    used_s: Counter[str] = field(default_factory=Counter)

    def step_ms(self, num_tokens: int) -> dict[str, float]:
        """Milliseconds by process, for each of the `num_tokens` of a stream in a round; the largest first."""
        steps = num_tokens * len(self.speeds)
        return {part: 1e3 * time_s / steps for part, time_s in self.used_s.most_common()}


async def measure(options: argparse.Namespace, kinds: list[str], to: Stack) -> dict[str, Found]:
    """By kind; the first round is for warming up."""
    found = {kind: Found() for kind in kinds}
    times = ProcessTimes(to.pids)
    for number in range(options.rounds + 1):
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            times.lap()
            speed = await run_streams(to, kind, options.streams, options.tokens, 1000 * number)
            if number:
                found[kind].speeds.append(speed)
                found[kind].used_s.update(times.lap())
    return found


def told(options: argparse.Namespace, found: dict[str, Found]) -> dict[str, Any]:
    """The row of results."""
    row: dict[str, Any] = {"benchmark": "grammar_streams", "num_streams": options.streams}
    row |= {"up": options.up, "num_tokens": options.tokens}
    plain = found["plain"].step_ms(options.tokens)
    for kind, of_kind in found.items():
        pairs = zip(of_kind.speeds, found["plain"].speeds, strict=True)
        ratios = [mine / other for mine, other in pairs]
        row[kind] = {
            "tokens_per_s": round(median(of_kind.speeds), 1),
            "ratio": round(median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        if options.processes:
            mine = of_kind.step_ms(options.tokens)
            row[kind]["cpu_ms"] = {p: round(ms, 2) for p, ms in mine.items() if ms >= 0.01}
            more = {part: round(ms - plain.get(part, 0.0), 2) for part, ms in mine.items()}
            row[kind]["cpu_more_ms"] = {part: ms for part, ms in more.items() if ms}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--kinds", default=",".join(GRAMMARS), help="which; plain always")
    parser.add_argument("--processes", action="store_true", help="tell processor times as well")
    parser.add_argument("--up", default="--cohost", help="arguments of `finback up`, in one string")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    kinds = ["plain", *(kind for kind in options.kinds.split(",") if kind != "plain")]
    if unknown := set(kinds) - set(GRAMMARS):
        parser.error(f"--kinds: {', '.join(sorted(unknown))}; there are {', '.join(GRAMMARS)}")
    with stack(*options.up.split()) as to:
        found = asyncio.run(measure(options, kinds, to))
    row = told(options, found)
    if options.keep:
        record(row)
    else:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
