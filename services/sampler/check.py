"""One grammar, looked at from the command line: compile it, draw samples, judge texts.

    python -m finback.services.sampler.check < asked.json > told.json

Asked: {model, kind, text, strictness, num_samples, seed, max_tokens, texts}. The grammar is compiled
and its masks are computed by the service's own desks and workers, within the same budgets.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from finback.services.sampler.catalogue import Catalogue, Entry
from finback.services.sampler.check_walk import Walk, WalkTokens, draw, judge
from finback.services.sampler.compile_desk import CompileDesk
from finback.services.sampler.fork_client import ForkClient
from finback.services.sampler.grammar_source import read_source
from finback.services.sampler.mask_desk import MaskDesk
from finback.services.sampler.worker_pool import WorkerPool
from finback.shared.codec.load import load_tokenizer
from finback.shared.errors import ConfigError, ServingError
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import GrammarSpec

_MAX_REWRITTEN = 100


async def check(asked: dict[str, Any]) -> dict[str, Any]:
    """What to tell. `refused` is there if the grammar cannot be served, `error` if the model cannot."""
    spec = GrammarSpec(
        kind=asked["kind"], text=asked["text"], strictness=asked.get("strictness", "strict")
    )
    try:
        async with _desks(asked["model"]) as (compiler, masks, forks):
            try:
                entry = await compiler.entry(spec)
            except ServingError as error:
                return {"refused": _refusal(error)}
            tokenizer = load_tokenizer(open_source(asked["model"]).text)
            vocabulary = WalkTokens(tokenizer, forks.vocab_size, forks.eos_ids)
            walk = Walk(masks, vocabulary, entry.grammar_id, spec)
            told = _accepted(entry, spec)
            told["samples"] = [
                await _sample(walk, asked.get("seed", 0) + at, asked["max_tokens"])
                for at in range(asked.get("num_samples", 0))
            ]
            told["texts"] = [await judge(walk, text) for text in asked.get("texts", ())]
            return told
    except ConfigError as error:
        return {"error": str(error)}


async def _sample(walk: Walk, seed: int, max_tokens: int) -> dict[str, Any]:
    """A random answer; one that is whole is judged again, character by character."""
    drawn = await draw(walk, seed=seed, max_tokens=max_tokens)
    if drawn["is_whole"] and not (await judge(walk, drawn["text"]))["is_whole"]:
        drawn["error"] = "the grammar takes it token by token, and not character by character"
    return drawn


@asynccontextmanager
async def _desks(model: str) -> AsyncIterator[tuple[CompileDesk, MaskDesk, Any]]:
    """What the service is made of, without a network."""
    forks = ForkClient(model)
    facts = await forks.start()
    masks: list[MaskDesk] = []
    pool = WorkerPool(forks, 1, lambda link: masks[0].lost(link) if masks else None)
    catalogue = Catalogue(lambda _: None)
    compiler = CompileDesk(pool, catalogue)
    masks.append(MaskDesk(pool, catalogue, compiler))
    await pool.start()
    tasks = [asyncio.create_task(loop()) for loop in (pool.keep_filled, masks[0].watch)]
    try:
        yield compiler, masks[0], facts
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
        pool.close()


def _refusal(error: ServingError) -> dict[str, Any]:
    reason, _, pointer = (error.reason or "").partition(" at ")
    return {"text": error.public_message, "reason": reason, "pointer": pointer}


def _accepted(entry: Entry, spec: GrammarSpec) -> dict[str, Any]:
    """Read once more for how it was rewritten: it was shown to take little."""
    rewritten = [item for item in read_source(spec).rewritten if item[0] not in entry.widened]
    measured = entry.measured
    return {
        "grammar_id": entry.grammar_id,
        "engine": entry.engine,
        "placement": entry.placement,
        "widened": list(entry.widened),
        "rewritten": [list(item) for item in rewritten[:_MAX_REWRITTEN]],
        "num_rewritten": len(rewritten),
        "num_bytes": entry.num_bytes,
        "num_engine_chars": len(entry.engine_text),
        "compile_ms": round(measured.compile_ms, 3),
        "load_ms": round(measured.load_ms, 3),
        "max_mask_ms": round(measured.max_mask_ms, 3),
    }


def main() -> int:
    """Standard input to standard output."""
    told = asyncio.run(check(json.load(sys.stdin)))
    json.dump(told, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
