"""Each CUDA kernel's share of its ceiling, over launch shapes: what the defaults were chosen from.

usage: python -m benchmarks.cuda_kernels [--sections linear decode prefill sampling] [--out FILE]

Launches go over several sets of inputs, so that nothing is found in a cache, inside of one graph. The
ceilings are this device's own: 4.28 TB/s of copies and 712 TFLOP/s of bfloat16 products on an H200.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention

from finback.kernels.decode_attention import LaunchShape, new_workspace
from finback.kernels.decode_attention import cuda_triton as decode
from finback.kernels.paged_attention import cuda_triton as prefill
from finback.kernels.sample_tokens import SamplingTensors
from finback.kernels.sample_tokens import cuda_triton as sampling
from finback.kernels.skinny_linear import cuda_triton as linear
from finback.kernels.triton_launch import num_multiprocessors
from finback.shared.engine.device import record_graph

BYTES_PER_S = 4.28e12
FLOPS_PER_S = 712e12
BLOCK_SIZE = 64
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some launches under one shape. `floor_us`: what one launch takes at the ceiling."""

    section: str
    name: str
    shape: tuple[int, ...]
    launches: int
    floor_us: float
    launch: Callable[[], object]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Uniform values."""
    return torch.empty(shape, device="cuda", dtype=dtype).uniform_(-1.0, 1.0)


PRODUCTS = {
    "qkv": (1024, 4096, True, False, 28),
    "o": (2048, 1024, False, False, 28),
    "gate_up": (1024, 3072, True, True, 28),
    "down": (3072, 1024, False, False, 28),
    "head": (1024, 151_936, False, False, 3),
}
PRODUCTS_8B = {
    "8b qkv": (4096, 6144, True, False, 6),
    "8b o": (4096, 4096, False, False, 8),
    "8b gate_up": (4096, 12_288, True, True, 3),
    "8b down": (12_288, 4096, False, False, 4),
    "8b head": (4096, 151_936, False, False, 1),
}


def linear_cases(
    products: dict[str, tuple[int, int, bool, bool, int]] = PRODUCTS,
) -> Iterator[Case]:
    """One row of a model's products."""
    for name, (size_in, size_out, norm, gated, copies) in products.items():
        rows = size_out * (2 if gated else 1)
        weights = [tensor(rows, size_in) for _ in range(copies)]
        x, weight = tensor(1, size_in, dtype=torch.float32), tensor(size_in, dtype=torch.float32)
        out = tensor(1, size_out, dtype=torch.float32)

        def launch(
            shape: tuple[int, int, int], x: Any = x, weight: Any = weight, weights: Any = weights,
            out: Any = out, norm: bool = norm, gated: bool = gated,
        ) -> None:  # fmt: skip
            linear.one_row_tile = lambda *_: shape
            for w in weights:
                linear.skinny_linear(
                    x, w, out=out, norm_weight=weight if norm else None, eps=1e-6,
                    residual=None if norm else out, activation="silu_mul" if gated else "none",
                )  # fmt: skip

        block_in = [512, 1024] if size_in == 1024 else [512, 1024, 2048]
        outs = [8, 16, 32] if name.endswith("head") else [2, 4, 8, 16]
        for shape in itertools.product(outs, block_in, (2, 4, 8)):
            if not 4 <= shape[0] * shape[1] * (2 if gated else 1) / (shape[2] * 32 * 8) <= 32:
                continue  # too little, or too much for the registers
            yield Case(
                section="linear", name=name, shape=shape, launches=copies,
                floor_us=rows * size_in * 2 / BYTES_PER_S * 1e6,
                launch=partial(launch, shape),
            )  # fmt: skip


def decode_lengths() -> dict[str, list[int]]:
    """Context lengths of one stream, of equal ones, and of such as a mixed load has."""
    source = random.Random(0)
    mixed = [source.randint(100, 1024) + source.randint(0, 700) for _ in range(256)]
    return {
        "1x300": [300],
        "512x140": [140] * 512,
        "512x300": [300] * 512,
        "256 mixed": mixed,
        "64 mixed": mixed[:64],
        "16 mixed": mixed[:16],
        "4 mixed": mixed[:4],
        "32x6240": [6240] * 32,
    }


def decode_cases() -> Iterator[Case]:
    """Decode attention: shapes of a program, and how contexts are split."""
    for name, lengths in decode_lengths().items():
        num_seqs, width = len(lengths), -(-max(lengths) // BLOCK_SIZE)
        layers = max(2, min(28, 3000 // (num_seqs * width)))
        blocks_shape = (layers, num_seqs * width + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        k, v = tensor(*blocks_shape), tensor(*blocks_shape)
        table = (torch.randperm(num_seqs * width, device="cuda") + 1).view(num_seqs, width).int()
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        qkv = tensor(num_seqs, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        out = tensor(num_seqs, HEADS * HEAD_DIM)
        norm = tensor(HEAD_DIM, dtype=torch.float32)
        cos = tensor(8192, HEAD_DIM // 2, dtype=torch.float32)

        def launch(
            shape: tuple[int, int, int, int], k: Any = k, v: Any = v, qkv: Any = qkv,
            table: Any = table, lens: Any = lens, out: Any = out, norm: Any = norm,
            cos: Any = cos, num_seqs: int = num_seqs,
        ) -> object:  # fmt: skip
            resident, tile, warps, stages = shape
            programs = resident * num_multiprocessors(torch.device("cuda")) // KV_HEADS
            workspace = new_workspace(
                num_seqs, HEADS, KV_HEADS, HEAD_DIM,
                LaunchShape(
                    num_programs=programs, tile=tile, num_warps=warps, num_stages=stages
                ),
                "cuda",
            )  # fmt: skip
            for layer in range(k.shape[0]):
                decode.decode_attention(
                    qkv, k[layer], v[layer], q_norm=norm, k_norm=norm, eps=1e-6, cos=cos, sin=cos,
                    block_tables=table, context_lens=lens, scale=0.1, out=out, workspace=workspace,
                )  # fmt: skip
            return workspace

        for shape in (
            (4, 64, 4, 1), (1, 64, 4, 3), (2, 64, 4, 3), (3, 64, 4, 2), (2, 64, 8, 3),
            (3, 64, 2, 2), (4, 32, 2, 3), (3, 32, 2, 3), (6, 32, 2, 2), (3, 32, 2, 4),
            (4, 32, 4, 3), (4, 32, 1, 3), (6, 32, 1, 2), (8, 16, 1, 3), (12, 16, 1, 2),
            (8, 16, 1, 2), (6, 16, 1, 4), (16, 16, 1, 2), (6, 32, 2, 3), (8, 32, 1, 2),
        ):  # fmt: skip
            yield Case(
                section="decode", name=name, shape=shape, launches=layers,
                floor_us=sum(lengths) * KV_HEADS * HEAD_DIM * 4 / BYTES_PER_S * 1e6,
                launch=partial(launch, shape),
            )  # fmt: skip


def prefill_cases() -> Iterator[Case]:
    """Prompt attention: two prompts of 8192, against torch's own kernels on unpaged KV."""
    num_seqs, length = 2, 8192
    width = length // BLOCK_SIZE
    k = tensor(num_seqs * width, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    v = tensor(*k.shape)
    q = tensor(num_seqs * length, HEADS, HEAD_DIM)
    out = torch.empty_like(q)
    table = torch.arange(num_seqs * width, device="cuda").view(num_seqs, width).int()
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device="cuda")
    cu = torch.arange(num_seqs + 1, device="cuda").int() * length
    floor_us = num_seqs * length**2 / 2 * 4 * HEADS * HEAD_DIM / FLOPS_PER_S * 1e6

    def ours(shape: tuple[int, int, int, int]) -> None:
        prefill.launch_shape = lambda *_: shape
        prefill.paged_attention(q, k, v, table, cu, lens, 0.08, out=out)

    for shape in (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 32, 8, 4),
        (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4),
        (128, 128, 8, 2), (128, 128, 8, 3), (256, 64, 8, 2), (256, 64, 8, 3), (256, 64, 16, 3),
    ):  # fmt: skip
        yield Case(
            section="prefill", name="ours", shape=shape, launches=1, floor_us=floor_us,
            launch=partial(ours, shape),
        )  # fmt: skip
    heads = q.view(num_seqs, length, HEADS, HEAD_DIM).transpose(1, 2)
    keys = k.view(num_seqs, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
    values = v.view(num_seqs, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
    backends = torch.nn.attention.SDPBackend

    def theirs(backend: Any) -> None:
        with torch.nn.attention.sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(
                heads, keys, values, is_causal=True, enable_gqa=True
            )

    for backend in (backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION):
        yield Case(
            section="prefill", name=str(backend), shape=(), launches=1, floor_us=floor_us,
            launch=partial(theirs, backend),
        )  # fmt: skip


def sampling_cases() -> Iterator[Case]:
    """512 rows of 151,936 logits: temperature only, and all filters over flat and over peaked ones."""
    rows, vocab_size = 512, 151_936
    flat = tensor(rows, vocab_size, dtype=torch.float32)
    # As a trained model's: a few tokens stand far out of a normal bulk.
    peaked = torch.randn(rows, vocab_size, device="cuda") * 2.0
    peaked[:, :40] += torch.linspace(20.0, 8.0, 40, device="cuda")
    ones = torch.ones(rows, device="cuda")
    for name, filters, logits in (
        ("temperature", False, flat), ("filters, flat", True, flat),
        ("filters, peaked", True, peaked),
    ):  # fmt: skip
        params = SamplingTensors(
            temperature=ones * 0.6, top_k=torch.full((rows,), 50, device="cuda").int(),
            top_p=ones * 0.9, min_p=ones * 0.01, has_filters=filters,
            seed=torch.arange(rows, device="cuda"), position=torch.arange(rows, device="cuda"),
        )  # fmt: skip
        yield Case(
            section="sampling", name=name, shape=(), launches=1,
            floor_us=rows * vocab_size * 4 / BYTES_PER_S * 1e6,
            launch=partial(sampling.sample_tokens, logits, params),
        )  # fmt: skip


SECTIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "linear": linear_cases,
    "linear 8b": partial(linear_cases, PRODUCTS_8B),
    "decode": decode_cases,
    "prefill": prefill_cases,
    "sampling": sampling_cases,
}


def time_us(case: Case, repeat: int = 7) -> tuple[float, float]:
    """(median, spread) of one launch, in microseconds."""
    replay, kept = record_graph(case.launch)
    found = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / case.launches)
    del kept
    return statistics.median(found[1:]), max(found[1:]) - min(found[1:])


def compile_shards(sections: list[str], count: int) -> None:
    """Compile into the shared cache with several processes."""
    command = [sys.executable, "-m", "benchmarks.cuda_kernels", "--sections", *sections, "--shard"]
    running = [subprocess.Popen([*command, str(index), str(count)]) for index in range(count)]
    for process in running:
        process.wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--shard", nargs=2, type=int, help="compile every COUNTth case only")
    parser.add_argument("--compilers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cuda_kernels.jsonl"))
    arguments = parser.parse_args()
    if arguments.shard is None:
        compile_shards(arguments.sections, arguments.compilers)
    for section in arguments.sections:
        rows: list[dict[str, Any]] = []
        for index, case in enumerate(SECTIONS[section]()):
            if arguments.shard and index % arguments.shard[1] != arguments.shard[0]:
                continue
            try:
                if arguments.shard:
                    case.launch()
                    continue
                median, spread = time_us(case)
            except Exception as error:  # noqa: BLE001 - a shape that does not fit is a result too
                rows.append({"name": case.name, "shape": case.shape, "error": str(error)[:80]})
                continue
            rows.append(
                {
                    "section": section,
                    "name": case.name,
                    "shape": case.shape,
                    "us": round(median, 2),
                    "spread_us": round(spread, 2),
                    "share": round(case.floor_us / median, 3),
                }
            )
        if arguments.shard:
            continue
        rows.sort(key=lambda row: (row["name"], row.get("us", 1e9)))
        with arguments.out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        for _, group in itertools.groupby(rows, key=lambda row: row["name"]):
            for row in list(group)[:5]:
                print(row, flush=True)


if __name__ == "__main__":
    main()
