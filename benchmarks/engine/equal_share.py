"""How many texts stay the same when a sequence is batched, chunked, drafted or preempted.

    python benchmarks/engine/equal_share.py [--mode fast] [--num 16] [--tokens 64]

One JSON line a way: the share of sequences with equal tokens to running alone, and the mean length of
the common beginning. In deterministic mode both are whole, which tests assert.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from finback.shared.cores import num_cores
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceKey, SequenceSpec
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import SamplingSpec

Texts = dict[SequenceKey, list[int]]


def make_specs(num: int, num_tokens: int, vocab_size: int) -> list[SequenceSpec]:
    """Half greedy, half seeded; prompts of 20 to 200 random tokens with a common beginning."""
    rng = np.random.default_rng(0)
    shared = rng.integers(100, vocab_size - 100, 70)
    specs = []
    for index in range(num):
        own = rng.integers(100, vocab_size - 100, int(rng.integers(20, 130)))
        sampling = SamplingSpec(
            temperature=0.8 * (index % 2), max_tokens=num_tokens, ignore_eos=True
        )
        specs.append(
            SequenceSpec(
                key=(f"r{index}", 0),
                attempt=1,
                token_ids=np.append(shared, own).astype(np.int32),
                sampling=sampling,
                seed=index,
                drafting=True,
            )
        )
    return specs


async def run(
    model: CausalLM, config: EngineConfig, specs: Sequence[SequenceSpec], truth: Texts
) -> Texts:
    """All of them together; drafts are the truth with every seventh token wrong."""
    texts: Texts = {spec.key: [] for spec in specs}
    prompts = {spec.key: int(spec.token_ids.size) for spec in specs}
    done = asyncio.Event()
    left = set(texts)

    def on_step(output: StepOutput) -> None:
        for row in output.rows:
            texts[row.key] += row.token_ids.tolist()
            if row.end is not None:
                left.discard(row.key)
        for key, position in output.want_drafts:
            start = position - prompts[key]
            guess = np.array(truth.get(key, [])[start : start + 9], dtype=np.int32)
            guess[[i for i in range(guess.size) if (start + i) % 7 == 6]] = 0
            engine.provide_draft(key, position, guess)
        if not left:
            done.set()

    engine = Engine(model, config, on_step=on_step)
    await engine.start()
    for spec in specs:
        engine.add(spec)
    await done.wait()
    await engine.stop()
    return texts


def compare(way: str, truth: Texts, texts: Texts) -> None:
    """Print one line."""
    common = []
    for key, expected in truth.items():
        pairs = zip(expected, texts[key], strict=True)
        common.append(next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected)))
    equal = sum(texts[key] == expected for key, expected in truth.items())
    print(
        json.dumps(
            {
                "way": way,
                "sequences": len(truth),
                "equal_share": round(equal / len(truth), 3),
                "mean_common_tokens": round(sum(common) / len(common), 1),
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--num", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model = load_model(open_source(args.model), "cpu", args.mode, num_threads=num_cores())
    specs = make_specs(args.num, args.tokens, model.config.vocab_size)
    base = EngineConfig(
        mode=args.mode, num_blocks=64, block_size=32, max_model_len=512, max_draft_tokens=0
    )
    single = replace(base, max_num_seqs=1, prefix_caching=False)
    truth = asyncio.run(run(model, single, specs, {}))
    ways = {
        "batched": base,
        "chunked": replace(base, max_num_seqs=8, max_num_batched_tokens=24),
        "drafted": replace(base, max_draft_tokens=4),
        "preempted": replace(base, num_blocks=18),
    }
    for way, config in ways.items():
        compare(way, truth, asyncio.run(run(model, config, specs, truth)))
    model.close()


if __name__ == "__main__":
    main()
