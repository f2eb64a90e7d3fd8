"""Offline speed of the engine on an NVIDIA device: requests in, all tokens out, on random weights.

usage: python benchmarks/cuda_engine.py --model qwen3-0.6b --workloads latency decode

The workloads of `cuda_models` through `Engine`: scheduler, plans, device-resident steps, commits. All
requests are added at once; a run ends when the last token is committed on the event loop. The prefix
cache is reset before every run, and no prompt may find anything in it (agent excepted, within a run).
One JSON line a workload goes to the results.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from cuda_models import MODELS, Request, requests

from finback.kernels import dispatch
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.cuda_transformer import CudaTransformer
from finback.shared.models.random_weights import RandomWeights
from finback.shared.wire.messages.generate import SamplingSpec

DEVICE = "cuda"
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Run:
    """What one run of a workload brought."""

    num_left: int
    tokens: dict[str, int] = field(default_factory=dict)
    num_cached: int = 0
    num_steps: int = 0
    busy_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def on_step(self, output: StepOutput) -> None:
        """Count."""
        self.num_steps += bool(output.num_rows)
        self.busy_ms += output.duration_ms
        if output.num_rows:
            self.gaps_ms.append(output.duration_ms)
        for row in output.rows:
            self.tokens[row.key[0]] = self.tokens.get(row.key[0], 0) + int(row.token_ids.size)
            if row.end is not None:
                if row.end.finish_reason != "length":
                    raise RuntimeError(f"{row.key} ended with {row.end}")
                self.num_cached += row.end.num_cached_tokens
                self.num_left -= 1
        if not self.num_left:
            self.done.set()


class Bench:
    """An engine, and the run that its steps go to."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        config = MODELS[arguments.model]
        started = time.perf_counter()
        reader = RandomWeights(config, bound=1e-3, device=DEVICE)
        self.model = CudaTransformer(config, reader, dispatch.select_all(DEVICE, "fast"))
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started
        self._arguments = arguments
        self._run: Run | None = None
        self.engine = Engine(
            self.model,
            EngineConfig(
                device=DEVICE,
                kv_pool_bytes=int(arguments.kv_gib * 2**30),
                max_num_seqs=512,
                max_num_batched_tokens=arguments.batched_tokens,
                max_queue=1024,
                max_draft_tokens=0,
                overlap_below_ms=1000.0,
            ),
            on_step=self._on_step,
        )

    def _on_step(self, output: StepOutput) -> None:
        if self._run is not None:
            self._run.on_step(output)

    async def run(self, wanted: list[Request]) -> tuple[float, Run]:
        """Seconds of one run, and what it counted."""
        self.engine.reset_prefix_cache()
        specs = [
            SequenceSpec(
                key=(f"r{index}", 0),
                attempt=1,
                token_ids=np.array(item.prompt, dtype=np.int32),
                sampling=SamplingSpec(
                    temperature=self._arguments.temperature,
                    top_p=self._arguments.top_p,
                    top_k=self._arguments.top_k,
                    max_tokens=item.num_tokens,
                    ignore_eos=True,
                ),
                seed=index,
            )
            for index, item in enumerate(wanted)
        ]
        self._run = run = Run(num_left=len(specs))
        started = time.perf_counter()
        for spec in specs:
            if not self.engine.add(spec).accepted:
                raise RuntimeError(f"{spec.key} was refused")
        async with asyncio.timeout(TIMEOUT_S):
            waits = [
                asyncio.ensure_future(run.done.wait()),
                asyncio.ensure_future(self.engine.failed()),
            ]
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for item in done:
                item.result()
        seconds = time.perf_counter() - started
        for spec in specs:
            self.engine.forget(spec.key)
            if run.tokens.get(spec.key[0]) != spec.sampling.max_tokens:
                raise RuntimeError(f"{spec.key} has {run.tokens.get(spec.key[0])} tokens")
        return seconds, run

    async def measure(self, workload: str) -> dict[str, Any]:
        """Median of the repetitions, with all of them."""
        wanted = requests(workload, self.model.config.vocab_size)
        await self.run(wanted)
        seconds, cpu, loop_cpu = [], [], []
        for _ in range(self._arguments.repeat):
            before, loop_before = time.process_time(), time.thread_time()
            took_s, run = await self.run(wanted)
            cpu.append(time.process_time() - before)
            loop_cpu.append((time.thread_time() - loop_before) / max(1, run.num_steps))
            seconds.append(took_s)
            if workload != "agent" and run.num_cached:
                raise RuntimeError(f"{run.num_cached} prompt tokens were found in the cache")
        num_in = sum(len(item.prompt) for item in wanted)
        num_out = sum(item.num_tokens for item in wanted)
        median = statistics.median(seconds)
        return {
            "model": self._arguments.model,
            "workload": workload,
            "device": torch.cuda.get_device_name(),
            "software": f"torch {torch.__version__}",
            "temperature": self._arguments.temperature,
            "top_p": self._arguments.top_p,
            "top_k": self._arguments.top_k,
            "tokens_in": num_in,
            "tokens_out": num_out,
            "tokens_cached": run.num_cached,
            "median_s": round(median, 4),
            "seconds": [round(value, 4) for value in seconds],
            "out_tok_s": round(num_out / median),
            "in_tok_s": round(num_in / median),
            "steps": run.num_steps,
            "step_ms": round(statistics.median(run.gaps_ms), 3),
            "busy_s": round(run.busy_ms / 1e3, 4),
            "cpu_s": round(statistics.median(cpu), 3),
            "loop_cpu_ms": round(1e3 * statistics.median(loop_cpu), 3),
            "cpu_count": os.cpu_count(),
            "num_preemptions": self.engine.load().num_preemptions,
        }


async def run_all(arguments: argparse.Namespace) -> None:
    """All workloads over one engine."""
    bench = Bench(arguments)
    started = time.perf_counter()
    await bench.engine.start()
    start_s = time.perf_counter() - started
    print(f"weights {bench.load_s:.1f} s, engine start {start_s:.1f} s", flush=True)
    for workload in arguments.workloads:
        result = await bench.measure(workload)
        result |= {"load_s": round(bench.load_s, 2), "start_s": round(start_s, 2)}
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(result, flush=True)
        if arguments.profile:
            await _profile(bench, workload)
    await bench.engine.stop()


async def _profile(bench: Bench, workload: str) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        _, run = await bench.run(requests(workload, bench.model.config.vocab_size))
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda item: -item.self_device_time_total)
    for item in rows[:14]:
        each = item.self_device_time_total / max(1, run.num_steps)
        print(f"  {each:9.1f} us/step {item.count / run.num_steps:7.2f} calls  {item.key[:70]}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(MODELS))
    parser.add_argument("--workloads", nargs="+", default=["latency", "decode"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--kv-gib", type=float, default=64.0)
    parser.add_argument("--batched-tokens", type=int, default=16_384)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="device time by kernel of one run")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cuda_engine.jsonl"))
    uvloop.run(run_all(parser.parse_args()))


if __name__ == "__main__":
    main()
