"""What forced tokens bring: an object with fixed keys, with and without taking them in one step.

    python benchmarks/grammar/forced.py [--rounds 5] [--keep]

Two stacks, one with `grammar_tokens` 0, answer the same requests in turns, one at a time. The schema
leaves only short values open. Answers must be the same; the gain is the median over the rounds of
the ratio of seconds.
"""

import argparse
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

_PROPERTIES: Final[dict[str, Any]] = {
    "temperature_in_degrees_celsius": {"type": "integer"},
    "relative_humidity_percent": {"type": "integer"},
    "is_it_raining_right_now": {"type": "boolean"},
    "name_of_the_nearest_weather_station": {"enum": ["harbour", "airport", "university"]},
    "recommended_clothing_for_today": {"enum": ["raincoat", "sunglasses", "sweater"]},
}
SCHEMA: Final = {
    "type": "object",
    "properties": _PROPERTIES,
    "required": list(_PROPERTIES),
    "additionalProperties": False,
}
_NUM_REQUESTS: Final = 6


def ask(to: Stack, number: int) -> tuple[str, float]:
    """(answer, seconds) of one request."""
    body = {
        "model": to.model,
        "prompt": f"The weather of day {number} as JSON:\n",
        "max_tokens": 160,
        "temperature": 0.0,
        "structured_outputs": {"json": SCHEMA},
    }
    began_s = time.perf_counter()
    reply = httpx.post(f"{to.url}/v1/completions", json=body, timeout=120)
    seconds = time.perf_counter() - began_s
    if reply.is_error:
        raise SystemExit(reply.text)
    return str(reply.json()["choices"][0]["text"]), seconds


def one_round(jumping: Stack, stepping: Stack, number: int) -> float:
    """The ratio of seconds over a few requests; which stack is first alternates."""
    totals = {"jumping": 0.0, "stepping": 0.0}
    for at in range(_NUM_REQUESTS):
        order = [("jumping", jumping), ("stepping", stepping)]
        if (at + number) % 2:
            order.reverse()
        texts = set()
        for name, to in order:
            text, seconds = ask(to, number * _NUM_REQUESTS + at)
            totals[name] += seconds
            texts.add(text)
        if len(texts) > 1:
            raise SystemExit(f"the answers differ: {texts}")
    return totals["stepping"] / totals["jumping"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--up", default="--cohost --deterministic")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    up = options.up.split()
    with stack(*up) as jumping, stack(*up, "--set", "grammar_tokens=0") as stepping:
        gains = [one_round(jumping, stepping, number) for number in range(options.rounds + 1)][1:]
    row = {
        "benchmark": "grammar_forced",
        "up": options.up,
        "gain": round(median(gains), 3),
        "gains": [round(gain, 3) for gain in gains],
    }
    if options.keep:
        record(row)
    else:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
