"""Answers kept to real-world schemas, drawn by the embedded model at a high temperature and checked.

    python benchmarks/grammar/generations.py [--limit 3000] [--first 0] [--temperature 1.5] [--keep]
        [--state FILE] [--streams 48] [--tokens 256] [--up "--cohost"] [--url http://host:port]

Answer `i` is to schema `i % 400` of those of jsonschemabench's sample (../shared/data) that are
accepted, with seed `i`. An answer that ended by itself is checked by `jsonschema`, formats too; one
that did not must say `length`. Answers that `--state` holds are not drawn again, but for
errors and hangs, so that a run may be made in parts. One JSON line goes to results/ (`--keep`). Exit code 1: one is invalid, or hung.
"""

import argparse
import asyncio
import collections
import contextlib
import gzip
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema
from jsonschema.validators import validator_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grammar.compile import BENCH, record
from stack_under_test import stack

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.model_vocabulary import load_engine_tokenizer
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

NUM_SCHEMAS: Final = 400
# An answer of which no token comes for so long hangs. Streamed, so that a busy machine is only slow.
HANG_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A schema and its independent judge."""

    name: str
    schema: Any
    judge: Any


def accepted_cases(most: int = NUM_SCHEMAS) -> list[Case]:
    """The first of the sample that the sampler accepts."""
    vocabulary = Vocabulary(*load_engine_tokenizer("embedded"))
    cases: list[Case] = []
    with gzip.open(BENCH, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            schema = row["schema"]
            try:
                spec = GrammarSpec(kind="json_schema", text=json.dumps(schema))
                compile_grammar(vocabulary, spec, row["name"])
            except InvalidRequest:
                continue
            cls = validator_for(schema, default=jsonschema.Draft202012Validator)
            judge = cls(schema, format_checker=cls.FORMAT_CHECKER)
            cases.append(Case(name=row["name"], schema=schema, judge=judge))
            if len(cases) == most:
                break
    return cases


async def draw(client: httpx.AsyncClient, case: Case, seed: int, options: Any) -> dict[str, Any]:
    """One answer and what it is: `valid`, `cut`, `invalid`, `error` or `hang`."""
    body = {
        "model": options.model,
        "prompt": f"A JSON document ({case.name}):\n",
        "max_tokens": options.tokens,
        "temperature": options.temperature,
        "seed": seed,
        "structured_outputs": {"json": case.schema},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    row: dict[str, Any] = {"seed": seed, "schema": case.name}
    text, reason = "", None
    try:
        async for chunk in chunks(client, body):
            if "error" in chunk:
                return row | {"outcome": "error", "detail": json.dumps(chunk)[:500]}
            for choice in chunk["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
            if chunk.get("usage"):
                row["num_tokens"] = chunk["usage"]["completion_tokens"]
    except TimeoutError:
        return row | {"outcome": "hang", "text": text}
    except httpx.HTTPError as error:
        return row | {"outcome": "error", "detail": repr(error)[:500]}
    return row | judged(case, text, reason or "none")


async def chunks(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The documents of a stream, or the body of a refusal. `TimeoutError` if none comes for long."""
    async with contextlib.AsyncExitStack() as held:
        async with asyncio.timeout(HANG_S):
            reply = await held.enter_async_context(
                client.stream("POST", "/v1/completions", json=body)
            )
        if reply.status_code != 200:
            yield json.loads(await reply.aread())
            return
        lines = reply.aiter_lines()
        while True:
            async with asyncio.timeout(HANG_S):
                line = await anext(lines, None)
                # Signs of life are no tokens.
                while line is not None and not line.startswith("data: {"):
                    line = await anext(lines, None)
            if line is None:
                return
            yield json.loads(line.removeprefix("data: "))


def judged(case: Case, text: str, reason: str) -> dict[str, Any]:
    """What an answer is by what it says."""
    if reason == "length":
        return {"outcome": "cut"}
    if reason != "stop":
        return {"outcome": "invalid", "detail": f"finish_reason {reason}", "text": text}
    try:
        value = json.loads(text)
    except ValueError as error:
        return {"outcome": "invalid", "detail": f"no JSON: {error}", "text": text}
    fault = next(iter(case.judge.iter_errors(value)), None)
    if fault is not None:
        return {"outcome": "invalid", "detail": str(fault)[:500], "text": text}
    return {"outcome": "valid"}


async def run(options: argparse.Namespace, cases: list[Case], known: set[int]) -> float:
    """Draw what lacks, `streams` at a time; seconds."""
    todo = [
        seed for seed in range(options.first, options.first + options.limit) if seed not in known
    ]
    todo.reverse()
    began_s = time.perf_counter()
    limits = httpx.Limits(max_connections=options.streams)
    with options.state.open("a", encoding="utf-8") as out:
        async with httpx.AsyncClient(base_url=options.url, timeout=None, limits=limits) as client:

            async def worker() -> None:
                while todo:
                    seed = todo.pop()
                    row = await draw(client, cases[seed % len(cases)], seed, options)
                    out.write(json.dumps(row) + "\n")
                    out.flush()

            async with asyncio.TaskGroup() as group:
                for _ in range(options.streams):
                    group.create_task(worker())
    return time.perf_counter() - began_s


def rows_of(state: Path) -> dict[int, dict[str, Any]]:
    """What is known, by seed; the last word counts."""
    if not state.exists():
        return {}
    with state.open(encoding="utf-8") as lines:
        return {row["seed"]: row for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument("--state", type=Path, default=Path("generations.jsonl"))
    parser.add_argument("--up", default="--cohost", help="arguments of `finback up`, in one string")
    parser.add_argument("--url", default="", help="of a running stack; else one is started")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--keep", action="store_true", help="add the result to results/")
    options = parser.parse_args()
    cases = accepted_cases()
    known = {
        seed
        for seed, row in rows_of(options.state).items()
        if row["outcome"] not in ("error", "hang")
    }
    if options.url:
        seconds = asyncio.run(run(options, cases, known))
    else:
        with stack(*options.up.split()) as to:
            options.url = to.url
            seconds = asyncio.run(run(options, cases, known))
    raise SystemExit(told(options, cases, seconds, known))


def told(options: argparse.Namespace, cases: list[Case], seconds: float, known: set[int]) -> int:
    """Say what came of all answers so far."""
    rows = rows_of(options.state)
    counts = collections.Counter(row["outcome"] for row in rows.values())
    new = sum(row.get("num_tokens", 0) for seed, row in rows.items() if seed not in known)
    summary: dict[str, Any] = {
        "benchmark": "grammar_generations",
        "num_answers": len(rows),
        "num_schemas": len(cases),
        "num_schemas_finished": len(
            {r["schema"] for r in rows.values() if r["outcome"] == "valid"}
        ),
        "temperature": options.temperature,
        "max_tokens": options.tokens,
        "num_tokens": sum(row.get("num_tokens", 0) for row in rows.values()),
        "new_tokens_per_s": round(new / seconds, 1),
        **{kind: counts[kind] for kind in ("valid", "cut", "invalid", "error", "hang")},
    }
    for row in rows.values():
        if row["outcome"] in ("invalid", "error", "hang"):
            sys.stderr.write(json.dumps(row) + "\n")
    record(summary) if options.keep else print(json.dumps(summary))
    return 1 if counts["invalid"] + counts["error"] + counts["hang"] else 0


if __name__ == "__main__":
    main()
