"""The other side of `against_llama_cpp.py`: the Finback engine as a co-hosted worker runs it.

Same protocol as `llama_cpp_peer.py`, and `profile` answers with milliseconds a step by phase since the
last time (with the argument `--profile` before the settings). Random prompts of distinct tokens (no prefix hits), greedy,
no end token, drafting off. Sampling, scheduling and the commit of tokens are inside the time.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np

from finback.shared.config import load
from finback.shared.engine.build import engine_config
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceSpec
from finback.shared.models.cpu_profile import PhaseProfile
from finback.shared.models.cpu_stack import CpuStack
from finback.shared.models.loader import load_model
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import SamplingSpec

PROMPT_TOKENS = 128


class Peer:
    """One engine; every workload is a set of new sequences."""

    def __init__(
        self, model: Path, num_threads: int, extra: dict[str, str], *, is_profiled: bool
    ) -> None:
        settings = {"model": str(model), "num_threads": str(num_threads), **extra}
        config, _ = load(env={}, overrides=settings)
        self._steps: list[tuple[float, StepOutput]] = []
        self._done = asyncio.Event()
        self._open = 0
        source = open_source(config.model)
        sizes = engine_config(config, source)
        network = load_model(source, sizes.device, sizes.mode, num_threads=sizes.num_threads)
        self.numerics = network.numerics
        self.profile: PhaseProfile | None = None
        if is_profiled and isinstance(network, CpuStack):
            self.profile = network.profile()
        self.engine = Engine(network, sizes, on_step=self._on_step, owns_model=True)
        self._rng = np.random.default_rng(0)
        self._names = 0

    async def prefill(self, num_tokens: int) -> float:
        """Tokens per second of one prompt, its first sampled token included."""
        elapsed = await self._generate(1, num_tokens, 1)
        return num_tokens / elapsed

    async def decode(self, num_seqs: int, num_steps: int) -> float:
        """Tokens per second by the median time between steps in which all sequences decode."""
        await self._generate(num_seqs, PROMPT_TOKENS, num_steps + 1)
        times = [when for when, output in self._steps if len(output.rows) == num_seqs]
        return num_seqs / float(np.median(np.diff(times)))

    async def _generate(self, num_seqs: int, num_prompt: int, num_tokens: int) -> float:
        self._steps.clear()
        self._done.clear()
        self._open = num_seqs
        started = time.perf_counter()
        for _ in range(num_seqs):
            self._add(num_prompt, num_tokens)
        await asyncio.wait_for(self._done.wait(), 300)
        return time.perf_counter() - started

    def _add(self, num_prompt: int, num_tokens: int) -> None:
        self._names += 1
        prompt = self._rng.integers(10, 49_000, num_prompt).astype(np.int32)
        sampling = SamplingSpec(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        spec = SequenceSpec(
            key=(f"bench-{self._names}", 0), attempt=1, token_ids=prompt, sampling=sampling, seed=0
        )
        admission = self.engine.add(spec)
        if not admission.accepted:
            raise SystemExit(f"refused: {admission.message}")

    def _on_step(self, output: StepOutput) -> None:
        self._steps.append((time.perf_counter(), output))
        for row in output.rows:
            if row.end is not None:
                if row.end.finish_reason != "length":
                    raise SystemExit(f"ended early: {row.end}")
                self.engine.forget(row.key)
                self._open -= 1
        if self._open == 0:
            self._done.set()


async def serve(peer: Peer) -> None:
    """Serve workloads until stdin ends."""
    await peer.engine.start()
    print(json.dumps({"version": f"finback {peer.numerics}"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        kind, *numbers = line.split()
        if kind == "profile":
            found = peer.profile.take() if peer.profile is not None else {}
            print(json.dumps(found), flush=True)
            continue
        sizes = [int(number) for number in numbers]
        rate = await (peer.prefill(*sizes) if kind == "prefill" else peer.decode(*sizes))
        print(json.dumps({"tokens_per_s": rate}), flush=True)
    await peer.engine.stop()


async def main() -> None:
    """Load, then serve."""
    settings = [item for item in sys.argv[3:] if item != "--profile"]
    extra = dict(item.split("=", 1) for item in settings)
    is_profiled = "--profile" in sys.argv[3:]
    await serve(Peer(Path(sys.argv[1]), int(sys.argv[2]), extra, is_profiled=is_profiled))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main())
