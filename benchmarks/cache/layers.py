"""Time to first token of a prompt whose first 2,048 tokens lie in the host's cache: with and without
waiting for all of their layers.

    python benchmarks/cache/layers.py [--rounds 40] [--last 4,64]

The embedded model, a cache, a NATS server and a worker with both roles, all in one process, without a
gateway. Prompts end with `--last` new tokens. Turns alternate, and the device pool forgets everything
before each, so that both kinds feel the same machine. Prints one line a length.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from finback.shared.engine.build import engine_config
from finback.shared.engine.engine import Engine
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import SamplingSpec
from support.kept_stack import KeptStack, kept_stack
from support.nats_server import NatsServer
from support.role_stack import until

PREFIX_TOKENS = 2048
SAMPLING = SamplingSpec(temperature=0.0, max_tokens=2, ignore_eos=True)


async def ask(made: KeptStack, host: WorkerHost, prompt: list[int]) -> tuple[float, int]:
    """(milliseconds to the first token, cached tokens)."""
    generation = await made.generate(prompt, host, sampling=SAMPLING)
    first_s = generation.answers[0].first_s - generation.sent_s
    return 1e3 * first_s, generation.end.num_cached_tokens


async def compare(made: KeptStack, host: WorkerHost, num_last: int, rounds: int) -> dict[str, Any]:
    """Medians of both kinds; only prompts count that found their prefix in memory."""
    draw = random.Random(num_last)
    prefix = [draw.randrange(1000, 40_000) for _ in range(PREFIX_TOKENS)]
    cold_ms, _ = await ask(made, host, [*prefix, *range(2000, 2000 + num_last)])
    await made.settle()
    took: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * rounds):
        by_layers = bool(turn % 2)
        host.prefixes.by_layers = by_layers
        host.engine.reset_prefix_cache()
        last = [draw.randrange(1000, 40_000) for _ in range(num_last)]
        ms, cached = await ask(made, host, [*prefix, *last])
        # Less: the machine was so busy that the cache did not answer in time.
        if cached == PREFIX_TOKENS:
            took[by_layers].append(ms)
        await made.settle()
    whole, layers = median(took[False]), median(took[True])
    return {
        "last_tokens": num_last,
        "rounds": [len(took[kind]) for kind in (False, True)],
        "cold_ms": round(cold_ms, 1),
        "whole_ms": round(whole, 1),
        "by_layers_ms": round(layers, 1),
        "ratio": round(layers / whole, 3),
        "best_ms": [round(min(took[kind]), 1) for kind in (False, True)],
        "num_by_layers": host.metrics.value("finback.worker.blocks_by_layers", outcome="good"),
    }


async def run(lengths: list[int], rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as nats:
        server = NatsServer(folder=Path(nats), max_payload=8 * 2**20)
        server.start()
        try:
            settings = {"model": "embedded", "kv_pool_bytes": 256 * 2**20, "max_model_len": 4096}
            async with kept_stack(server, "layers", Path(folder), **settings) as made:
                source = open_source("embedded")
                config = engine_config(made.nest.config, source)
                model = load_model(source, "cpu", config.mode, num_threads=config.num_threads)
                host = await made.nest.worker_with(
                    lambda _, on_step: Engine(model, config, on_step=on_step), "prefill", "decode"
                )
                made.workers.append(host)
                await until(lambda: host.cache.is_there)
                for length in lengths:
                    print(json.dumps(await compare(made, host, length, rounds)), flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--last", default="4,64")
    given = parser.parse_args()
    asyncio.run(run([int(length) for length in given.last.split(",")], given.rounds))
