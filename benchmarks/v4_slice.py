"""A slice of DeepSeek V4-Flash at its real widths and formats on one NVIDIA device: decoding steps.

usage: python benchmarks/v4_slice.py [--rows 1 16 64 256] [--context 1000] [--profile] [--out FILE]

Eight layers (2 window-only, 3 CSA, 3 HCA) with random weights, experts in fp4, activations in fp8,
everything else in bfloat16. Every sequence has a position of its own around `--context`; tokens are
random, so experts are drawn as routing draws them. The floor counts the bytes of the experts really
touched, of all other weights, and of KV, at 4.28 TB/s.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from finback.shared.models.deepseek_v4.config import V4Config, Yarn
from finback.shared.models.deepseek_v4.cuda_decode import CudaDecoder
from finback.shared.models.deepseek_v4.cuda_weights import CudaLayerWeights, cuda_layer
from finback.shared.models.deepseek_v4.memory import V4Memory
from finback.shared.models.deepseek_v4.random_weights import RandomV4

BYTES_PER_S = 4.28e12
RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)
CONFIG = V4Config(
    vocab_size=129_280,
    hidden_size=4096,
    num_layers=len(RATIOS),
    num_heads=64,
    head_dim=512,
    rope_dim=64,
    q_rank=1024,
    num_output_groups=8,
    output_rank=1024,
    window=128,
    ratios=RATIOS,
    index_num_heads=64,
    index_head_dim=128,
    index_top_k=512,
    num_experts=256,
    num_shared_experts=1,
    num_experts_per_token=6,
    expert_size=2048,
    num_hash_layers=3,
    routed_scaling=1.5,
    swiglu_limit=10.0,
    num_streams=4,
    sinkhorn_iterations=20,
    hyper_eps=1e-6,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    compress_rope_theta=160_000.0,
    yarn=Yarn(factor=16.0, original_max_len=65_536),
    max_model_len=1_048_576,
)


def build() -> CudaDecoder:
    """The slice on the device."""
    draw = RandomV4(CONFIG, dtype=torch.bfloat16, device="cuda")
    layers = [
        cuda_layer(CONFIG, draw.layer(index), *draw.experts()) for index in range(CONFIG.num_layers)
    ]
    return CudaDecoder(
        CONFIG,
        tuple(layers),
        embedding=draw.matrix(CONFIG.vocab_size, CONFIG.hidden_size) * 64,
        head_mix=draw.hyper(CONFIG.num_streams, 1),
        norm=draw.norm(CONFIG.hidden_size),
        head=draw.matrix(CONFIG.vocab_size, CONFIG.hidden_size),
        max_context=2048,
    )


def plain_bytes(layers: tuple[CudaLayerWeights, ...]) -> int:
    """Bytes of all weights that every step reads: those of layers without routed experts, and the head."""
    total = 2 * CONFIG.vocab_size * CONFIG.hidden_size
    for layer in layers:
        for name in ("project", "query_b", "output_a", "output_b", "gate"):
            total += getattr(layer, name).nbytes
        total += layer.shared_gate_up.nbytes + layer.shared_down.nbytes
        total += layer.attention_mix.fn.nbytes + layer.mixture_mix.fn.nbytes
    return total


def measure(decoder: CudaDecoder, rows: int, context: int, *, profile: bool) -> dict[str, Any]:
    """One batch size."""
    blocks_each = -(-2048 // 128)
    memory = V4Memory(
        CONFIG, num_blocks=rows * blocks_each, num_slots=rows, dtype=torch.bfloat16, device="cuda"
    )
    generator = torch.Generator("cuda").manual_seed(rows)
    kind: Any = {"generator": generator, "device": "cuda"}
    positions = torch.randint(context - 128, context + 128, (rows,), **kind)
    ids = torch.randint(2, CONFIG.vocab_size, (rows,), **kind)
    slots = torch.arange(rows, device="cuda")
    blocks = torch.arange(rows * blocks_each, device="cuda").view(rows, blocks_each)
    touched: list[int] = []

    def run() -> torch.Tensor:
        return decoder.step(
            ids, decoder.tables(positions, slots, blocks, memory.layers), memory.layers
        )

    with torch.no_grad():
        run()
        touched = count_touched(run)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run()
        times = []
        for _ in range(12):
            start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
            ids.copy_(logits.argmax(dim=1))
            positions += 1
        if profile:
            show_profile(graph)
    expert = 3 * CONFIG.expert_size * CONFIG.hidden_size * (0.5 + 1 / 32)
    entries = sum(context // ratio for ratio in RATIOS if ratio)
    kv = rows * 1024.0 * (len(RATIOS) * CONFIG.window + entries)
    others = plain_bytes(decoder._layers)  # what was just built here
    floor = 1e3 * (sum(touched) * expert + others + kv) / BYTES_PER_S
    median = statistics.median(times[2:])
    return {
        "rows": rows,
        "context": context,
        "ms": round(median, 3),
        "spread_ms": [round(min(times[2:]), 3), round(max(times[2:]), 3)],
        "floor_ms": round(floor, 3),
        "share": round(floor / median, 3),
        "touched": touched,
        "tokens_per_s": round(1e3 * rows / median),
    }


def count_touched(run: Any) -> list[int]:
    """Experts that a step touches, layer by layer."""
    from finback.shared.models.deepseek_v4 import cuda_decode as module

    cuda_decode: Any = module
    seen: list[int] = []
    original = cuda_decode.expert_mlp_w4a8

    def counting(
        hidden: Any, gate_up: Any, down: Any, experts: Any, *rest: Any, **more: Any
    ) -> Any:
        seen.append(len(set(experts.flatten().tolist())))
        return original(hidden, gate_up, down, experts, *rest, **more)

    cuda_decode.expert_mlp_w4a8 = counting
    try:
        run()
    finally:
        cuda_decode.expert_mlp_w4a8 = original
    return seen


def show_profile(graph: Any) -> None:
    """Time by kernel of one replay, to stderr."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    table = profiler.key_averages().table(
        sort_by="cuda_time_total", row_limit=24, max_name_column_width=60
    )
    print(table, file=sys.stderr)


def main() -> None:
    """Print one JSON line a batch size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = [
        json.dumps(
            {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "triton": triton.__version__,
                "commit": commit,
                "command": " ".join(sys.argv),
            }
        )
    ]
    decoder = build()
    lines[0] = lines[0][:-1] + f', "memory_gib": {torch.cuda.memory_allocated() / 2**30:.1f}}}'
    print(lines[0], flush=True)
    for rows in arguments.rows:
        found = measure(decoder, rows, arguments.context, profile=arguments.profile)
        lines.append(json.dumps(found))
        print(lines[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
