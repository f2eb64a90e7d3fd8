"""V4's Triton kernels against their references: called under the interpreter and on a device."""

from typing import Any

import torch

from finback.kernels.expert_mlp_fp4.reference import Fp4Matrices
from support.triton_cases import device, normal, relative_error

TOLERANCE = 1e-2


def floats() -> torch.dtype:
    """What kernels compute in: the interpreter multiplies bfloat16 as if it were integers."""
    return torch.float32 if device() == "cpu" else torch.bfloat16


def random_matrices(
    num_experts: int, size_out: int, size_in: int, seed: int, where: str | None = None
) -> Fp4Matrices:
    """All codes; scales that differ by up to eight octaves within a row."""
    generator = torch.Generator().manual_seed(seed)
    kind: dict[str, Any] = {"generator": generator, "dtype": torch.uint8}
    codes = torch.randint(0, 256, (num_experts, size_out, size_in // 2), **kind)
    scales = torch.randint(114, 123, (num_experts, size_out, size_in // 32), **kind)
    where = where or device()
    return Fp4Matrices(codes.to(where), scales.to(where))


def check_experts(rows: int, num_experts: int, size: int, inner: int, top_k: int) -> None:
    from finback.kernels.expert_mlp_fp4 import cuda_triton as fp4
    from finback.kernels.expert_mlp_fp4 import reference as fp4_reference
    from finback.kernels.expert_mlp_w4a8 import cuda_triton as w4a8
    from finback.kernels.expert_mlp_w4a8 import reference as w4a8_reference
    from finback.kernels.expert_mlp_w4a8.packing import pack

    gate_up = random_matrices(num_experts, 2 * inner, size, seed=1)
    down = random_matrices(num_experts, size, inner, seed=2)
    hidden = normal(rows, size, seed=3).to(floats())
    generator = torch.Generator().manual_seed(4)
    experts = torch.randint(-1, num_experts, (rows, top_k), generator=generator).to(device())
    weights = normal(rows, top_k, seed=5).abs()
    expected = fp4_reference.expert_mlp_fp4(hidden, gate_up, down, experts, weights, limit=4.0)
    found = fp4.expert_mlp_fp4(hidden, gate_up, down, experts, weights, limit=4.0)
    assert relative_error(found, expected) < TOLERANCE
    arguments = (pack(gate_up), pack(down), experts, weights)
    expected = w4a8_reference.expert_mlp_w4a8(hidden, gate_up, down, experts, weights, limit=4.0)
    found = w4a8.expert_mlp_w4a8(hidden, *arguments, limit=4.0)
    assert relative_error(found, expected) < TOLERANCE


def check_latent_attention(
    queries: int, heads: int, size: int, num_window: int, num_entries: int, parts: int
) -> None:
    from finback.kernels.latent_attention import cuda_triton, reference

    generator = torch.Generator().manual_seed(queries)
    tables = [normal(rows, size, seed=rows).to(floats()) for rows in (300, 200)]
    rows = [
        torch.randint(-1, table.shape[0], (queries, count), generator=generator)
        .to(torch.int32)
        .to(device())
        for table, count in zip(tables, (num_window, num_entries), strict=True)
    ]
    rows[0][0], rows[1][0] = -1, -1  # a query that sees nothing: only its sink
    q, sinks = normal(queries, heads, size, seed=7).to(floats()), normal(heads, seed=8)
    arguments = (q, tables[0], rows[0], tables[1], rows[1], sinks, size**-0.5)
    expected = reference.latent_attention(*arguments)
    shape = cuda_triton.LaunchShape(block=16 if device() == "cpu" else 64, num_parts=parts)
    found = cuda_triton.latent_attention(*arguments, shape=shape)
    torch.testing.assert_close(found.float(), expected.float(), atol=2e-2, rtol=2e-2)


def check_hyper_mix(rows: int, size: int) -> None:
    from finback.kernels.hyper_mix import cuda_triton, reference

    streams, output = normal(rows, 4, size, seed=1).to(floats()), normal(rows, size, seed=2)
    output = output.to(floats())
    fn, base, scale = normal(24, 4 * size, seed=3, scale=0.1), normal(24, seed=4), normal(3, seed=5)
    for norm in (None, normal(size, seed=6)):
        options: dict[str, Any] = {"norm_eps": 1e-6, "eps": 1e-6, "num_iterations": 20}
        arguments = (streams, fn, base, scale)
        expected = reference.hyper_mix(*arguments, **options, norm_weight=norm)
        found = cuda_triton.hyper_mix(*arguments, **options, norm_weight=norm)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(found.comb, expected.comb, atol=1e-4, rtol=0)
        spread = [
            module.hyper_spread(streams, output, expected) for module in (reference, cuda_triton)
        ]
        torch.testing.assert_close(spread[1], spread[0], atol=2e-2, rtol=2e-2)


def check_rows(rows: int, heads: int, size: int, ratio: int) -> None:
    """Norms with rotations, compressor state and entries, routing."""
    from finback.kernels.norm_rotary_pairs import cuda_triton as rotary
    from finback.kernels.norm_rotary_pairs import reference as rotary_reference
    from finback.kernels.route_experts import cuda_triton as route
    from finback.kernels.route_experts import reference as route_reference

    x, angles = normal(rows, heads, size, seed=1).to(floats()), normal(rows, size // 8, seed=2)
    cases: list[dict[str, Any]] = [{}, {"eps": 1e-6}, {"inverse": True}]
    cases.append({"eps": 1e-6, "weight": normal(size, seed=3)})
    for options in cases:
        expected = rotary_reference.norm_rotary_pairs(x, angles.cos(), angles.sin(), **options)
        found = rotary.norm_rotary_pairs(x, angles.cos(), angles.sin(), **options)
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    logits, bias = normal(rows, 256, seed=4), normal(256, seed=5)
    for options in ({"bias": bias}, {}):
        theirs = route_reference.route_experts(logits, top_k=6, scaling=1.5, **options)
        ours = route.route_experts(logits, top_k=6, scaling=1.5, **options)
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[1], theirs[1])
    _check_entries(rows, size, ratio)


def _check_entries(rows: int, size: int, ratio: int) -> None:
    from finback.kernels.store_entries import cuda_triton as entries
    from finback.kernels.store_entries import reference as entries_reference
    from finback.kernels.store_tail import cuda_triton as tail
    from finback.kernels.store_tail import reference as tail_reference

    overlap = ratio == 4
    channels = size * (2 if overlap else 1)
    generator = torch.Generator().manual_seed(rows)
    projected = normal(rows, 2 * channels + 8, seed=6).to(floats())[:, 8:]
    positions = torch.randint(0, 999, (rows,), generator=generator).to(device())
    places = torch.randperm(4 * rows, generator=generator)[:rows].to(device())
    angles, weight = normal(rows, size // 8, seed=8), normal(size, seed=9)
    span = 2 * ratio if overlap else ratio
    sources = torch.randint(-1, 4 * rows, (rows, span), generator=generator).to(torch.int32)
    sources[:, -1] = sources[:, -1].clamp(min=0)
    targets = torch.randperm(rows, generator=generator).to(torch.int32)
    targets[::3] = -1
    results = []
    for stores, makes in ((tail_reference, entries_reference), (tail, entries)):
        contents, gates = normal(4 * rows, channels, seed=10), normal(4 * rows, channels, seed=11)
        bias = normal(ratio, channels, seed=7)
        stores.store_tail(projected, bias, positions, places, contents, gates)
        table = torch.zeros((rows, size), dtype=floats(), device=device())
        makes.store_entries(
            contents,
            gates,
            sources.to(device()),
            targets.to(device()),
            table,
            weight,
            angles.cos(),
            angles.sin(),
            eps=1e-6,
            overlap=overlap,
        )
        results.append((contents, gates, table))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
