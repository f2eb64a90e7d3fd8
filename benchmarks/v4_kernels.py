"""DeepSeek V4's kernels at the widths of V4-Flash on an NVIDIA device: checked, then timed.

usage: python benchmarks/v4_kernels.py [--sections experts attention mix] [--sweep] [--out FILE]

Weights and rows are random. `floor_us` is the larger of bytes / 4.28 TB/s and FLOPs / 712 TFLOP/s (what an
H200 was measured to reach), counting only the experts that the rows really touch; `share` is
floor / time. Each case runs inside one CUDA graph over inputs that do not fit into the L2 cache.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from finback.kernels.expert_mlp_fp4 import cuda_triton as experts_triton
from finback.kernels.expert_mlp_fp4 import reference as experts_reference
from finback.kernels.expert_mlp_fp4.reference import Fp4Matrices
from finback.kernels.expert_mlp_w4a8 import cuda_triton as w4a8_triton
from finback.kernels.expert_mlp_w4a8 import reference as w4a8_reference
from finback.kernels.expert_mlp_w4a8.packing import pack
from finback.kernels.hyper_mix import cuda_triton as mix_triton
from finback.kernels.hyper_mix import reference as mix_reference
from finback.kernels.latent_attention import cuda_triton as attention_triton
from finback.kernels.latent_attention import reference as attention_reference

BYTES_PER_S, FLOPS_PER_S = 4.28e12, 712e12
HIDDEN, EXPERT, NUM_EXPERTS, TOP_K = 4096, 2048, 256, 6
HEADS, HEAD_DIM, WINDOW = 64, 512, 128
LIMIT = 10.0
ROWS = (1, 16, 64, 256, 1024, 8192)
Report = dict[str, Any]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max())


def time_us(launch: Callable[[], object], repeats: int = 5) -> list[float]:
    """Microseconds of one launch inside a graph of several, `repeats` times."""
    launch()
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), 4
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    graph.replay()
    found = []
    for _ in range(repeats):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / count)
    return sorted(found)


def report(name: str, times: list[float], num_bytes: float, flops: float, **more: Any) -> Report:
    """One result."""
    floor = 1e6 * max(num_bytes / BYTES_PER_S, flops / FLOPS_PER_S)
    median = statistics.median(times)
    return {
        "case": name,
        "us": round(median, 1),
        "spread_us": [round(times[0], 1), round(times[-1], 1)],
        "floor_us": round(floor, 1),
        "share": round(floor / median, 3),
        "tflops": round(flops / median / 1e6, 1),
        **more,
    }


# -- experts


def random_matrices(size_out: int, size_in: int, generator: torch.Generator) -> Fp4Matrices:
    """Codes of all kinds, scales around 2^-7."""
    kind: Any = {"generator": generator, "dtype": torch.uint8, "device": "cuda"}
    codes = torch.randint(0, 256, (NUM_EXPERTS, size_out, size_in // 2), **kind)
    scales = torch.randint(118, 122, (NUM_EXPERTS, size_out, size_in // 32), **kind)
    return Fp4Matrices(codes, scales)


def expert_cases(*, sweep: bool) -> Iterator[Report]:
    """The routed experts of one layer."""
    generator = torch.Generator("cuda").manual_seed(0)
    gate_up = random_matrices(2 * EXPERT, HIDDEN, generator)
    down = random_matrices(HIDDEN, EXPERT, generator)
    packed = pack(gate_up), pack(down)
    for rows in ROWS if not sweep else (64, 8192):
        hidden = torch.randn((rows, HIDDEN), generator=generator, device="cuda").bfloat16()
        order = torch.rand((rows, NUM_EXPERTS), generator=generator, device="cuda")
        experts = order.topk(TOP_K).indices
        weights = torch.rand((rows, TOP_K), generator=generator, device="cuda")
        arguments = (hidden, gate_up, down, experts, weights)
        touched = len(set(experts.flatten().tolist()))
        num_bytes = touched * 3 * EXPERT * HIDDEN * (0.5 + 1 / 32)
        flops = 6.0 * rows * TOP_K * EXPERT * HIDDEN
        arguments8 = (hidden, *packed, experts, weights)
        for name, call, truth in (
            (
                "bf16",
                partial(experts_triton.expert_mlp_fp4, *arguments, limit=LIMIT),
                experts_reference.expert_mlp_fp4,
            ),
            (
                "fp8",
                partial(w4a8_triton.expert_mlp_w4a8, *arguments8, limit=LIMIT),
                w4a8_reference.expert_mlp_w4a8,
            ),
        ):
            checked = {}
            if rows <= 64:
                checked["error"] = round(error(call(), truth(*arguments, limit=LIMIT)), 5)
            found = report(f"experts {name} {rows}", time_us(call), num_bytes, flops)
            yield {**found, "touched": touched, **checked}
            for shape in SHAPES[name](rows) if sweep else ():
                times = tried(partial(call, shapes=(shape, shape)))
                if times is None:
                    yield {"case": f"experts {name} {rows}", "shape": shape, "failed": True}
                else:
                    more = {"shape": shape}
                    yield report(f"experts {name} {rows}", times, num_bytes, flops, **more)


def tried(call: Callable[[], object]) -> list[float] | None:
    """Times, or None: a shape that does not fit is a result too."""
    try:
        return time_us(call, repeats=3)
    except (RuntimeError, triton.TritonError) as problem:
        print(str(problem)[:200], file=sys.stderr)
        return None


def shapes_bf16(rows: int) -> Iterator[experts_triton.LaunchShape]:
    """Launch shapes for this number of rows."""
    block_rows = (16,) if rows <= 256 else (64, 128)
    for block, out, steps, warps, stages in product(
        block_rows, (64, 128), (64, 128), (4, 8), (2, 4)
    ):
        yield experts_triton.LaunchShape(block, out, steps, warps, stages)


def shapes_fp8(rows: int) -> Iterator[w4a8_triton.LaunchShape]:
    """Launch shapes for this number of rows."""
    block_rows = (16,) if rows <= 256 else (64, 128)
    for block, warps, stages in product(block_rows, (4, 8), (1, 2, 3, 4, 5)):
        yield w4a8_triton.LaunchShape(block, warps, stages)


SHAPES: dict[str, Callable[[int], Iterator[Any]]] = {"bf16": shapes_bf16, "fp8": shapes_fp8}


# -- attention


def attention_cases(*, sweep: bool) -> Iterator[Report]:
    """Sparse attention over bfloat16 rows: (queries, entries a query), a window always."""
    generator = torch.Generator("cuda").manual_seed(1)
    kind: Any = {"generator": generator, "device": "cuda"}
    entries = torch.randn((400_000, HEAD_DIM), **kind).bfloat16()
    sinks = torch.randn((HEADS,), **kind)
    cases = [(rows, count) for rows in (1, 16, 64, 256) for count in (8, 256, 512)]
    for rows, count in [(64, 512), (8192, 512)] if sweep else [*cases, (8192, 512)]:
        queries = torch.randn((rows, HEADS, HEAD_DIM), **kind).bfloat16()
        window = torch.randn((rows * WINDOW if rows < 8192 else 8320, HEAD_DIM), **kind).bfloat16()
        at = torch.arange(WINDOW, device="cuda")[None, :]
        first = torch.arange(rows, device="cuda")[:, None] * (WINDOW if rows < 8192 else 1)
        window_rows = (first + at).to(torch.int32)
        limit = entries.shape[0] if rows < 8192 else 2048
        entry_rows = torch.randint(0, limit, (rows, count), dtype=torch.int32, **kind)
        arguments = (queries, window, window_rows, entries, entry_rows, sinks, HEAD_DIM**-0.5)
        call = partial(attention_triton.latent_attention, *arguments)
        num_rows = rows * (WINDOW + count)
        # Decoding reads every row from memory; a prompt's rows are shared and lie in the cache.
        read = num_rows if rows < 8192 else 8320 + 2048
        num_bytes = 2.0 * HEAD_DIM * (read + 2 * rows * HEADS)
        flops = 4.0 * HEADS * HEAD_DIM * num_rows
        checked = {}
        if rows <= 64:
            expected = attention_reference.latent_attention(*arguments)
            checked["error"] = round(error(call(), expected), 5)
        name = f"attention {rows} x {WINDOW}+{count}"
        yield {**report(name, time_us(call), num_bytes, flops), **checked}
        if sweep:
            for block, warps, stages in product((16, 32, 64), (4, 8, 16), (1, 2, 3)):
                shape = attention_triton.LaunchShape(block, 0, warps, stages)
                times = tried(partial(call, shape=shape))
                if times is None:
                    yield {"case": name, "shape": shape, "failed": True}
                else:
                    yield report(name, times, num_bytes, flops, shape=shape)


# -- hyper-connections


def mix_cases(*, sweep: bool) -> Iterator[Report]:
    """One site: mix with the norm, and spread."""
    del sweep
    generator = torch.Generator("cuda").manual_seed(2)
    kind: Any = {"generator": generator, "device": "cuda"}
    fn = torch.randn((24, 4 * HIDDEN), **kind) / 128
    base, scale = torch.randn((24,), **kind), torch.randn((3,), **kind)
    norm = torch.rand((HIDDEN,), **kind).bfloat16()
    options: Any = {"norm_eps": 1e-6, "eps": 1e-6, "num_iterations": 20, "norm_weight": norm}
    for rows in (1, 16, 64, 256, 8192):
        streams = torch.randn((rows, 4, HIDDEN), **kind).bfloat16()
        output = torch.randn((rows, HIDDEN), **kind).bfloat16()
        mix = mix_reference.hyper_mix(streams, fn, base, scale, **options)
        found = mix_triton.hyper_mix(streams, fn, base, scale, **options)
        errors = [round(error(a, b), 6) for a, b in zip(found, mix, strict=True)]
        call = partial(mix_triton.hyper_mix, streams, fn, base, scale, **options)
        stream_bytes = 2.0 * rows * 4 * HIDDEN
        num_bytes = stream_bytes + 2.0 * rows * HIDDEN + fn.numel() * 4
        flops = 2.0 * rows * 24 * 4 * HIDDEN
        yield report(f"mix {rows}", time_us(call), num_bytes, flops, errors=errors)
        spread = partial(mix_triton.hyper_spread, streams, output, mix)
        off = error(spread(), mix_reference.hyper_spread(streams, output, mix))
        num_bytes = 2 * stream_bytes + 2.0 * rows * HIDDEN
        yield report(f"spread {rows}", time_us(spread), num_bytes, 0.0, error=round(off, 6))


SECTIONS = {"experts": expert_cases, "attention": attention_cases, "mix": mix_cases}


def main() -> None:
    """Print one JSON line a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--sweep", action="store_true", help="try launch shapes too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit,
        "command": " ".join(sys.argv),
    }
    lines = [json.dumps(facts)]
    print(lines[0], flush=True)
    for name in arguments.sections:
        for found in SECTIONS[name](sweep=arguments.sweep):
            lines.append(json.dumps(found))
            print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
