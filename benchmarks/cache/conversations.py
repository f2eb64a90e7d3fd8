"""Conversations that grow turn by turn, through the whole stack: blocks reused, and what that brings.

    python benchmarks/cache/conversations.py [--conversations 24] [--turns 15] [--clients 10]

Each client takes a conversation and asks all its turns, one after the other; all begin with the same
system text. A turn's prompt is what was said so far (ids, so that it is exactly that), answers are
greedy. Twice: as `finback up` serves by default, with a device pool that cannot hold them all, and with
prefix caching off. The ideal is an infinite cache: of each prompt, the leading full blocks of which
every token was computed by a request that had ended before. Appends a JSON line to
`benchmarks/results/cache_conversations.jsonl`.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1])]

from stack_under_test import stack

from finback.shared.kv import block_hash

BLOCK: Final = 64
TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class Oracle:
    """An infinite cache: hashes of all blocks that were ever computed."""

    known: set[bytes] = field(default_factory=set)

    def ideal_tokens(self, prompt: list[int]) -> int:
        """Leading tokens of a prompt that it holds; never the last token's block."""
        count = 0
        for name in self._chain(prompt[:-1]):
            if name not in self.known:
                break
            count += BLOCK
        return count

    def learn(self, tokens: list[int]) -> None:
        """The KV of these was computed."""
        self.known.update(self._chain(tokens))

    def _chain(self, tokens: list[int]) -> list[bytes]:
        return block_hash.chain(np.array(tokens, dtype=np.int32), BLOCK, b"", b"")


@dataclass(slots=True)
class Totals:
    """What all turns brought."""

    num_turns: int = 0
    prompt_tokens: int = 0
    ideal_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    first_ms: list[float] = field(default_factory=list)


class Run:
    """All conversations over one stack."""

    def __init__(self, url: str, model: str, options: argparse.Namespace) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._options = options
        self._oracle = Oracle()
        self.totals = Totals()

    async def go(self) -> float:
        """Seconds for everything."""
        waiting = list(range(self._options.conversations))
        limits = httpx.Limits(max_connections=self._options.clients)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            await self._ask(client, _ids("warm", 400))
            self.totals, self._oracle = Totals(), Oracle()
            started = time.perf_counter()

            async def one_client() -> None:
                while waiting:
                    await self._conversation(client, waiting.pop(0))

            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._options.clients):
                    tasks.create_task(one_client())
            return time.perf_counter() - started

    async def _conversation(self, client: httpx.AsyncClient, number: int) -> None:
        said = _ids("system", self._options.system_tokens)
        for turn in range(self._options.turns):
            said += _ids(f"{number} {turn}", self._options.user_tokens)
            said += await self._ask(client, said)

    async def _ask(self, client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        ideal, started, first_ms = self._oracle.ideal_tokens(prompt), time.perf_counter(), 0.0
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._options.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, usage = list[int](), dict[str, Any]()
        async with client.stream("POST", self._url, json=body) as reply:
            if reply.status_code != 200:
                raise SystemExit((await reply.aread()).decode())
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                for choice in chunk.get("choices", ()):
                    first_ms = first_ms or 1e3 * (time.perf_counter() - started)
                    answer += choice.get("token_ids") or ()
                usage = chunk.get("usage") or usage
        self._count(prompt, answer, usage, ideal, first_ms)
        return answer

    def _count(
        self,
        prompt: list[int],
        answer: list[int],
        usage: dict[str, Any],
        ideal: int,
        first_ms: float,
    ) -> None:
        # Of the last token nobody computes the KV.
        self._oracle.learn([*prompt, *answer][:-1])
        totals = self.totals
        totals.num_turns += 1
        totals.prompt_tokens += usage["prompt_tokens"]
        totals.answer_tokens += usage["completion_tokens"]
        totals.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
        totals.ideal_tokens += ideal
        totals.first_ms.append(first_ms)


def _ids(seed: str, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def measure(options: argparse.Namespace, *, prefix_caching: bool) -> dict[str, Any]:
    """One stack, all conversations."""
    os.environ["FINBACK_PREFIX_CACHING"] = "true" if prefix_caching else "false"
    os.environ["FINBACK_KV_POOL_BYTES"] = str(options.pool_mb << 20)
    os.environ["FINBACK_ARENA_BYTES"] = str(options.arena_mb << 20)
    with stack(*options.up.split()) as made:
        run = Run(made.url, made.model, options)
        seconds = asyncio.run(run.go())
    totals = run.totals
    ordered = sorted(totals.first_ms)
    return {
        "seconds": round(seconds, 1),
        "turns_per_s": round(totals.num_turns / seconds, 3),
        "prompt_tokens": totals.prompt_tokens,
        "answer_tokens": totals.answer_tokens,
        "cached_tokens": totals.cached_tokens,
        "ideal_cached_tokens": totals.ideal_tokens,
        "of_ideal": round(totals.cached_tokens / totals.ideal_tokens, 4),
        "first_token_median_ms": round(ordered[len(ordered) // 2], 1),
        "first_token_p90_ms": round(ordered[len(ordered) * 9 // 10], 1),
    }


def main() -> None:
    """Both stacks, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--system-tokens", type=int, default=256)
    parser.add_argument("--user-tokens", type=int, default=150)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--pool-mb", type=int, default=512, help="device pool of an engine")
    parser.add_argument("--arena-mb", type=int, default=3072, help="host tier")
    parser.add_argument("--up", default="", help="arguments of `finback up`, in one string")
    parser.add_argument("--only-cached", action="store_true", help="leave the slow half out")
    options = parser.parse_args()
    record: dict[str, Any] = {
        "unix_s": int(time.time()),
        "command": " ".join(["benchmarks/cache/conversations.py", *sys.argv[1:]]),
        "cached": measure(options, prefix_caching=True),
    }
    if not options.only_cached:
        record["uncached"] = measure(options, prefix_caching=False)
        ratio = record["uncached"]["seconds"] / record["cached"]["seconds"]
        record["throughput_ratio"] = round(ratio, 2)
    print(json.dumps(record, indent=2))
    results = Path(__file__).parents[1] / "results" / "cache_conversations.jsonl"
    with results.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
