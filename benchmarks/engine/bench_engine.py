"""The engine alone: tokens a second, and what planning and committing cost beside the device.

    python benchmarks/engine/bench_engine.py [--model embedded] [--mode fast] [--overlap-ms 50]

One JSON line a case. `device_ms`: median step on the device thread; `step_ms`: median time from one
step's start to the next one's; `loop_ms`: the loop's own CPU a step (plan, commit, tell). Compare
ratios of one run only.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from finback.shared.cores import num_cores
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.causal_lm import CausalLM
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import SamplingSpec


@dataclass(slots=True)
class Run:
    """What a case recorded."""

    steps: list[StepOutput] = field(default_factory=list)
    num_ended: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)


async def run_case(model: CausalLM, args: argparse.Namespace, shape: tuple[int, int, int]) -> Any:
    """`shape`: (sequences, prompt tokens, completion tokens)."""
    num_seqs, num_prompt, num_completion = shape
    run = Run()

    def on_step(output: StepOutput) -> None:
        run.steps.append(output)
        run.num_ended += sum(row.end is not None for row in output.rows)
        if run.num_ended == num_seqs:
            run.done.set()

    config = EngineConfig(
        mode=args.mode,
        num_threads=args.threads,
        overlap_below_ms=args.overlap_ms,
        prefix_caching=False,
        max_model_len=4096,
    )
    engine = Engine(model, config, on_step=on_step)
    await engine.start()
    rng = np.random.default_rng(0)
    started, cpu = time.perf_counter(), time.thread_time()
    for index in range(num_seqs):
        spec = SequenceSpec(
            key=(f"r{index}", 0),
            attempt=1,
            token_ids=rng.integers(5, 49000, num_prompt).astype(np.int32),
            sampling=SamplingSpec(
                temperature=args.temperature, max_tokens=num_completion, ignore_eos=True
            ),
            seed=index,
        )
        if not engine.add(spec).accepted:
            raise SystemExit("a sequence was refused")
    await run.done.wait()
    wall, cpu = time.perf_counter() - started, time.thread_time() - cpu
    await engine.stop()
    return _report(run, shape, wall, cpu)


def _report(run: Run, shape: tuple[int, int, int], wall: float, cpu: float) -> dict[str, Any]:
    num_seqs, num_prompt, num_completion = shape
    decode = [s for s in run.steps if s.num_rows == num_seqs]
    starts = [s.started_s for s in decode]
    gaps = [1e3 * (b - a) for a, b in pairwise(starts)]
    first_decode = min((s.started_s for s in decode), default=0.0)
    prefill_s = first_decode - run.steps[0].started_s if decode else wall
    span = (starts[-1] - starts[0]) if len(starts) > 1 else float("nan")
    return {
        "sequences": num_seqs,
        "prompt": num_prompt,
        "completion": num_completion,
        "decode_tok_s": round(num_seqs * (len(starts) - 1) / span, 1),
        "prefill_tok_s": round(num_seqs * num_prompt / prefill_s, 1) if prefill_s else None,
        "device_ms": round(statistics.median(s.duration_ms for s in decode), 3),
        "step_ms": round(statistics.median(gaps), 3) if gaps else None,
        "loop_ms": round(1e3 * cpu / max(1, len(run.steps)), 3),
        "wall_s": round(wall, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--mode", default="fast")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--overlap-ms", type=float, default=50.0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cases", default="1x16x128,4x16x64,16x16x64,1x512x8")
    args = parser.parse_args()
    model = load_model(open_source(args.model), "cpu", args.mode, num_threads=args.threads)
    asyncio.run(run_case(model, args, (1, 16, 4)))  # warm
    for case in args.cases.split(","):
        a, b, c = (int(part) for part in case.split("x"))
        report = asyncio.run(run_case(model, args, (a, b, c)))
        print(json.dumps({**report, "mode": args.mode, "overlap_ms": args.overlap_ms}))


if __name__ == "__main__":
    main()
