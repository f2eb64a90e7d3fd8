"""Offline speed of the CUDA network: whole workloads, from token ids to token ids, on random weights.

usage: python benchmarks/cuda_offline.py --model qwen3-0.6b --workloads latency decode

Prompts are computed in chunks of whole sequences, then every step is one graph: forward, head,
sampling at temperature 0.6 over the full vocabulary, and the state's advance. All tokens come back to
the host and are counted. Prefix caching plays no part. One JSON line a workload goes to the results.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from cuda_models import MODELS, Request, requests

from finback.kernels import dispatch
from finback.kernels.sample_tokens import SamplingTensors
from finback.kernels.sample_tokens.cuda_triton import sample_tokens
from finback.shared.engine.resident_programs import BUCKETS
from finback.shared.models.batch import ForwardBatch
from finback.shared.models.cuda_decode_loop import DecodeLoop, DecodeState, new_state
from finback.shared.models.cuda_transformer import CudaTransformer
from finback.shared.models.random_weights import RandomWeights

TEMPERATURE = 0.6
BLOCK_SIZE = 64
CHUNK_ROWS = 16_384
DEVICE = "cuda"


def load(name: str) -> CudaTransformer:
    """A network of uniform(-1e-3, 1e-3) weights, as the peer's."""
    config = MODELS[name]
    reader = RandomWeights(config, bound=1e-3, device=DEVICE)
    return CudaTransformer(config, reader, dispatch.select_all(DEVICE, "fast"))


def on_device(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A host list on the device, without waiting."""
    return torch.tensor(values, dtype=dtype).pin_memory().to(DEVICE, non_blocking=True)


class Session:
    """A workload's requests with their blocks, and a loop for each bucket that it will pass.

    `wanted` is in the session's own order.
    """

    def __init__(self, model: CudaTransformer, wanted: list[Request]) -> None:
        # Longest first: programs of an attention kernel start in this order, and end together.
        wanted = sorted(wanted, key=lambda item: -len(item.prompt))
        self.model, self.wanted = model, wanted
        lengths = [len(item.prompt) + item.num_tokens for item in wanted]
        self.width = -(-max(lengths) // BLOCK_SIZE)
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        self.kv = model.new_pool(sum(counts) + 1, BLOCK_SIZE)
        tables = torch.zeros((len(wanted), self.width), dtype=torch.int32)
        cursor = 1
        for s, count in enumerate(counts):
            tables[s, :count] = torch.arange(cursor, cursor + count)
            cursor += count
        self.tables = tables.to(DEVICE)
        self.loops: dict[int, DecodeLoop] = {}
        most = max(item.num_tokens for item in wanted)
        for bucket in buckets_passed([item.num_tokens for item in wanted]):
            state = new_state(bucket, most, self.width, DEVICE)
            self.loops[bucket] = DecodeLoop(model, self.kv, state, TEMPERATURE)

    def prefill(self, state: DecodeState) -> None:
        """Compute all prompts and sample every first token into the state."""
        start = 0
        while start < len(self.wanted):
            end, rows = start, 0
            while end < len(self.wanted) and (
                end == start or rows + len(self.wanted[end].prompt) <= CHUNK_ROWS
            ):
                rows += len(self.wanted[end].prompt)
                end += 1
            self._prefill(state, start, end)
            start = end

    def _prefill(self, state: DecodeState, start: int, end: int) -> None:
        some = self.wanted[start:end]
        lengths = [len(item.prompt) for item in some]
        ends = torch.tensor(lengths).cumsum(0)
        cu_seqlens = [0, *ends.tolist()]
        context_lens = on_device(lengths)
        tables = self.tables[start:end]
        positions = on_device([p for length in lengths for p in range(length)])
        row_seqs = torch.repeat_interleave(
            torch.arange(len(some), device=DEVICE), context_lens, output_size=cu_seqlens[-1]
        )
        blocks = tables[row_seqs, positions // BLOCK_SIZE]
        hidden = self.model.forward(
            ForwardBatch(
                token_ids=on_device([token for item in some for token in item.prompt]),
                positions=positions,
                slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).int(),
                block_tables=tables,
                cu_seqlens=on_device(cu_seqlens),
                context_lens=context_lens,
                max_q=max(lengths),
                max_context=max(lengths),
                logit_rows=on_device([e - 1 for e in cu_seqlens[1:]], torch.int64),
            ),
            self.kv,
        )
        ones = torch.ones(len(some), device=DEVICE)
        first = sample_tokens(
            self.model.logits(hidden),
            SamplingTensors(
                temperature=ones * TEMPERATURE,
                top_k=torch.zeros(len(some), dtype=torch.int32, device=DEVICE),
                top_p=ones,
                min_p=torch.zeros_like(ones),
                seed=torch.arange(start, end, device=DEVICE),
                position=context_lens.long(),
                has_filters=False,
            ),
        ).token_ids
        rows = slice(start, end)
        wanted = on_device([item.num_tokens for item in some])
        state.history[rows, 0] = first
        state.token_ids[rows] = first
        state.num_sampled[rows] = 1
        state.max_sampled[rows] = wanted
        state.context_lens[rows] = torch.where(wanted > 1, context_lens + 1, 0)
        state.positions[rows] = context_lens.long() + 1
        state.block_tables[rows] = tables
        state.seeds[rows] = torch.arange(start, end, device=DEVICE)

    def run(self) -> list[list[int]]:
        """All tokens of all requests."""
        left = {s: item.num_tokens for s, item in enumerate(self.wanted)}
        tokens: list[list[int]] = [[] for _ in self.wanted]
        bucket = fitting(len(left))
        state = self.loops[bucket].state if bucket in self.loops else None
        if state is None:
            state = new_state(bucket, 1, self.width, DEVICE)
        state.context_lens.zero_()
        self.prefill(state)
        order, done = list(left), 1
        while True:
            live = [s for s in order if left[s] > done]
            smaller = fitting(len(live)) if live else 0
            if smaller < bucket:
                self._collect(state, order, [s for s in order if left[s] <= done], tokens)
                if not live:
                    return tokens
                state = self._move(state, order, live, smaller)
                order, bucket = live, smaller
            steps = steps_to_shrink([left[s] for s in live], done, bucket)
            for _ in range(steps):
                self.loops[bucket].step()
            done += steps

    def _collect(
        self, state: DecodeState, order: list[int], over: list[int], tokens: list[list[int]]
    ) -> None:
        rows = state.history.cpu().tolist()
        for s in over:
            tokens[s] = rows[order.index(s)][: self.wanted[s].num_tokens]

    def _move(
        self, state: DecodeState, order: list[int], live: list[int], bucket: int
    ) -> DecodeState:
        target = self.loops[bucket].state
        place = {s: row for row, s in enumerate(order)}
        index = on_device([place[s] for s in live], torch.int64)
        target.context_lens.zero_()
        for name in DecodeState.__dataclass_fields__:
            getattr(target, name)[: len(live)] = getattr(state, name)[index]
        return target


def fitting(num_rows: int) -> int:
    """The bucket of so many rows."""
    return next(bucket for bucket in BUCKETS if bucket >= num_rows)


def steps_to_shrink(counts: list[int], done: int, bucket: int) -> int:
    """Steps until fewer sequences are left than the next smaller bucket holds."""
    below = max((b for b in BUCKETS if b < bucket), default=0)
    ordered = sorted(counts, reverse=True)
    return (ordered[below] if below < len(ordered) else ordered[-1]) - done


def buckets_passed(counts: list[int]) -> list[int]:
    """Buckets that a workload goes through, largest first."""
    counts = [count for count in counts if count > 1]
    found, done = [], 1
    while counts:
        bucket = fitting(len(counts))
        found.append(bucket)
        done += steps_to_shrink(counts, done, bucket)
        counts = [count for count in counts if count > done]
    return list(dict.fromkeys(found))


def prefill_seconds(session: Session) -> float:
    """The prompts' share of a run."""
    state = next(iter(session.loops.values())).state
    torch.cuda.synchronize()
    started = time.perf_counter()
    session.prefill(state)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def profile(session: Session, steps: int = 20) -> list[dict[str, object]]:
    """Device time by kernel over some steps of the first bucket, in microseconds a step."""
    bucket = next(iter(session.loops))
    session.loops[bucket].state.context_lens.zero_()
    session.prefill(session.loops[bucket].state)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            session.loops[bucket].step()
        torch.cuda.synchronize()
    rows = sorted(recorded.key_averages(), key=lambda item: -item.self_device_time_total)
    return [
        {
            "kernel": item.key[:80],
            "us_a_step": round(item.self_device_time_total / steps, 1),
            "calls_a_step": round(item.count / steps, 2),
        }
        for item in rows[:16]
    ]


def measure(name: str, workload: str, model: CudaTransformer, repeat: int) -> dict[str, object]:
    """Median of `repeat` runs, with all of them."""
    started = time.perf_counter()
    session = Session(model, requests(workload, model.config.vocab_size))
    session.run()
    torch.cuda.synchronize()
    prepared_s = time.perf_counter() - started
    seconds = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        started = time.perf_counter()
        tokens = session.run()
        seconds.append(time.perf_counter() - started)
        for item, found in zip(session.wanted, tokens, strict=True):
            if len(found) != item.num_tokens:
                raise RuntimeError(f"{len(found)} tokens came back of {item.num_tokens}")
    num_in = sum(len(item.prompt) for item in session.wanted)
    num_out = sum(item.num_tokens for item in session.wanted)
    median = statistics.median(seconds)
    result: dict[str, object] = {
        "model": name,
        "workload": workload,
        "device": torch.cuda.get_device_name(),
        "tokens_in": num_in,
        "tokens_out": num_out,
        "median_s": round(median, 4),
        "seconds": [round(value, 4) for value in seconds],
        "out_tok_s": round(num_out / median),
        "in_tok_s": round(num_in / median),
        "prepared_s": round(prepared_s, 2),
    }
    if session.loops:
        result["prefill_s"] = round(prefill_seconds(session), 4)
        result["profile"] = profile(session)
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(MODELS))
    parser.add_argument("--workloads", nargs="+", default=["latency", "decode"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cuda_offline.jsonl"))
    arguments = parser.parse_args()
    model = load(arguments.model)
    for workload in arguments.workloads:
        result = measure(arguments.model, workload, model, arguments.repeat)
        with arguments.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        for row in result.pop("profile", []):  # type: ignore[attr-defined]  # a list, if there
            print(row)
        print(result, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
