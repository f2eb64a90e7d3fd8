"""Triton kernels against their references: called by tests under the interpreter and on a device."""

from typing import Any

import torch

from finback.kernels.sample_tokens import SamplingTensors
from support.triton_cases import (
    Heads,
    angles,
    device,
    matrix_dtype,
    normal,
    paged_case,
    relative_error,
)

BF16_TOLERANCE = 1e-2


def check_skinny_linear(
    rows: int, size_in: int, size_out: int, *, norm: bool, gated: bool, residual: bool
) -> None:
    from finback.kernels.skinny_linear import cuda_triton, reference

    x = normal(rows, size_in, seed=1)
    weight = normal(size_out * (2 if gated else 1), size_in, seed=2, scale=size_in**-0.5)
    weight = weight.to(matrix_dtype())
    arguments: dict[str, Any] = {
        "norm_weight": normal(size_in, seed=3) + 1.0 if norm else None,
        "eps": 1e-6,
        "activation": "silu_mul" if gated else "none",
    }
    added = normal(rows, size_out, seed=4) if residual else None
    results = []
    for module in (reference, cuda_triton):
        out = torch.full((rows, size_out), float("nan"), device=device())
        if added is not None:
            out.copy_(added)  # the residual stream is updated in place
        module.skinny_linear(x, weight, out=out, residual=out if residual else None, **arguments)
        results.append(out)
    assert relative_error(results[1], results[0]) < BF16_TOLERANCE


def check_add_rms_norm(rows: int, size: int) -> None:
    from finback.kernels.add_rms_norm import cuda_triton, reference

    weight, added = normal(size, seed=3) + 1.0, normal(rows, size, seed=1).bfloat16()
    for contribution in (None, added):
        results = []
        for module in (reference, cuda_triton):
            residual = normal(rows, size, seed=2)
            out = torch.full((rows, size), float("nan"), dtype=torch.bfloat16, device=device())
            module.add_rms_norm(residual, contribution, weight, 1e-6, out)
            results.append((residual, out))
        torch.testing.assert_close(results[1][0], results[0][0])
        assert relative_error(results[1][1], results[0][1]) < BF16_TOLERANCE


def check_silu_mul(rows: int, size: int) -> None:
    from finback.kernels.silu_mul import cuda_triton, reference

    x = normal(rows, 2 * size).bfloat16()
    assert relative_error(cuda_triton.silu_mul(x), reference.silu_mul(x)) < BF16_TOLERANCE


def check_embedding(rows: int, size: int) -> None:
    from finback.kernels.embedding import cuda_triton, reference

    table = normal(50, size).bfloat16()
    ids = torch.randint(0, 50, (rows,), device=device(), dtype=torch.int32)
    torch.testing.assert_close(
        cuda_triton.embedding(ids, table), reference.embedding(ids, table), rtol=0, atol=0
    )


def check_rotary_store_kv(heads: Heads, rows: int, *, norm: bool) -> None:
    from finback.kernels.rotary_store_kv import cuda_triton, reference

    qkv = normal(rows, heads.qkv_size).bfloat16()
    cos, sin = angles(300, heads.head_dim)
    weights = [normal(heads.head_dim, seed=s) + 1.0 if norm else None for s in (5, 6)]
    positions = torch.arange(rows, device=device(), dtype=torch.int32) + 7
    slots = torch.randperm(256, generator=torch.Generator().manual_seed(1))[:rows].int()
    slots[rows // 2] = -1
    results = []
    for module in (reference, cuda_triton):
        shape = (4, 64, heads.num_kv_heads, heads.head_dim)
        k = torch.zeros(shape, dtype=matrix_dtype(), device=device())
        v = torch.zeros_like(k)
        q = torch.full((rows, heads.num_heads * heads.head_dim), float("nan"), device=device())
        module.rotary_store_kv(
            qkv, k, v, q_norm=weights[0], k_norm=weights[1], eps=1e-6, cos=cos, sin=sin,
            positions=positions, slot_mapping=slots.to(device()), q_out=q,
        )  # fmt: skip
        results.append((q, k, v))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert relative_error(found, wanted) < BF16_TOLERANCE


def check_decode_attention(
    heads: Heads, context_lens: list[int], num_programs: int, *, norm: bool, tile: int = 32
) -> None:
    """`num_programs` 0: a program a sequence."""
    from finback.kernels.decode_attention import (
        LaunchShape,
        cuda_triton,
        new_workspace,
        reference,
    )

    cos, sin = angles(max(context_lens) + 1, heads.head_dim)
    weights = [normal(heads.head_dim, seed=s) + 1.0 if norm else None for s in (5, 6)]
    qkv = normal(len(context_lens), heads.qkv_size, seed=9).bfloat16()
    workspace = new_workspace(
        len(context_lens),
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        LaunchShape(
            num_programs=num_programs or len(context_lens),
            tile=tile,
            num_warps=2,
            num_stages=2,
            is_whole=not num_programs,
        ),
        device(),
    )
    results = []
    for module in (reference, cuda_triton):
        case = paged_case(heads, context_lens)
        out = torch.zeros((len(context_lens), heads.num_heads * heads.head_dim), device=device())
        for _ in range(2):  # twice: the workspace must be left as it was found
            module.decode_attention(
                qkv, case.k_blocks, case.v_blocks, q_norm=weights[0], k_norm=weights[1], eps=1e-6,
                cos=cos, sin=sin, block_tables=case.block_tables, context_lens=case.context_lens,
                scale=heads.head_dim**-0.5, out=out, workspace=workspace,
            )  # fmt: skip
        results.append((out, case.k_blocks.nan_to_num(), case.v_blocks.nan_to_num()))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert relative_error(found, wanted) < BF16_TOLERANCE


def check_shared_prefixes(
    heads: Heads, context_lens: list[int], groups: list[tuple[int, list[int]]], num_programs: int
) -> None:
    """`groups`: (blocks of 64 tokens, sequences that begin with them)."""
    from finback.kernels.decode_attention import (
        LaunchShape,
        cuda_triton,
        new_shared,
        new_workspace,
        num_members,
        reference,
    )

    cos, sin = angles(max(context_lens) + 1, heads.head_dim)
    weights = [normal(heads.head_dim, seed=s) + 1.0 for s in (5, 6)]
    qkv = normal(len(context_lens), heads.qkv_size, seed=9).bfloat16()
    sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim)
    shared = new_shared(len(context_lens), *sizes, device())
    shared.chunks[:, 1:] = -1
    most = num_members(heads.num_heads, heads.num_kv_heads)
    for chunk, (blocks, members) in enumerate(groups):
        assert 2 <= len(members) <= most
        shared.start_blocks[members] = blocks
        shared.chunks[chunk, 0] = blocks
        shared.chunks[chunk, 1 : 1 + len(members)] = torch.tensor(members)
    results = []
    for module in (reference, cuda_triton):
        case = paged_case(heads, context_lens)
        for blocks, members in groups:
            case.block_tables[members, :blocks] = case.block_tables[members[0], :blocks].clone()
        out = torch.zeros((len(context_lens), heads.num_heads * heads.head_dim), device=device())
        for _ in range(2):
            module.decode_attention(
                qkv, case.k_blocks, case.v_blocks, q_norm=weights[0], k_norm=weights[1], eps=1e-6,
                cos=cos, sin=sin, block_tables=case.block_tables, context_lens=case.context_lens,
                scale=heads.head_dim**-0.5, out=out, shared=shared,
                workspace=new_workspace(
                    len(context_lens), *sizes, LaunchShape(num_programs=num_programs, tile=32,
                    num_warps=2, num_stages=2), device(),
                ),
            )  # fmt: skip
        results.append((out, case.k_blocks.nan_to_num(), case.v_blocks.nan_to_num()))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert relative_error(found, wanted) < BF16_TOLERANCE


def check_paged_attention(heads: Heads, sequences: list[tuple[int, int]]) -> None:
    """`sequences`: (rows, context length with them)."""
    from finback.kernels.paged_attention import cuda_triton, reference

    case = paged_case(heads, [context for _, context in sequences])
    rows = torch.tensor([0, *(count for count, _ in sequences)])
    cu_seqlens = rows.cumsum(0).int().to(device())
    q = normal(int(rows.sum()), heads.num_heads, heads.head_dim, seed=9).to(matrix_dtype())
    results = [
        module.paged_attention(
            q, case.k_blocks, case.v_blocks, case.block_tables, cu_seqlens, case.context_lens,
            heads.head_dim**-0.5,
        )
        for module in (reference, cuda_triton)
    ]  # fmt: skip
    assert relative_error(results[1], results[0]) < BF16_TOLERANCE


def sampling(rows: int, **changes: Any) -> SamplingTensors:
    """Temperature 0.7, no filters, a seed and a position for each row; `changes` as plain values."""
    where, index = device(), torch.arange(rows, device=device())
    values: dict[str, Any] = {
        "temperature": torch.full((rows,), 0.7, device=where),
        "top_k": torch.zeros(rows, dtype=torch.int32, device=where),
        "top_p": torch.ones(rows, device=where),
        "min_p": torch.zeros(rows, device=where),
        "seed": index * 7_919_000_000_019 - 12345,
        "position": index + 1000,
        "has_filters": False,
    }
    for name, value in changes.items():
        like = values.get(name)
        if isinstance(like, torch.Tensor) and not isinstance(value, torch.Tensor):
            values[name] = torch.as_tensor(value, dtype=like.dtype, device=where)
        else:
            values[name] = value
    return SamplingTensors(**values)


def check_sample_tokens(logits: torch.Tensor, params: SamplingTensors) -> None:
    """Tokens and flags equal the reference's; logprobs are close."""
    from finback.kernels.sample_tokens import cuda_triton, reference

    found, wanted = (
        cuda_triton.sample_tokens(logits, params),
        reference.sample_tokens(logits, params),
    )
    assert found.is_finite.tolist() == wanted.is_finite.tolist()
    sound = wanted.is_finite
    assert found.token_ids[sound].tolist() == wanted.token_ids[sound].tolist()
    if wanted.logprobs is not None:
        torch.testing.assert_close(found.logprobs, wanted.logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.top_logprobs, wanted.top_logprobs, rtol=1e-5, atol=1e-5)


def check_filter_limits(logits: torch.Tensor, params: SamplingTensors) -> None:
    """The limits are the reference's thresholds, exactly: they are scores of tokens."""
    from finback.kernels.sample_tokens import cuda_triton, reference

    found = cuda_triton.filter_limits(logits, params).tolist()
    for row, limit in enumerate(found):
        scores = logits[row] / params.temperature[row]
        wanted = reference.threshold(
            scores, int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row])
        )
        assert abs(limit - wanted) <= 1e-6 * abs(wanted) or limit == wanted, (row, limit, wanted)


def check_gumbel_bits(rows: int) -> None:
    """The noise is that of noise.py up to float32 rounding."""
    from finback.kernels.sample_tokens.noise import gumbel

    logits = torch.zeros(rows, 5000, device=device())
    params = sampling(rows, temperature=[1.0] * rows)
    check_sample_tokens(logits, params)
    ids = torch.arange(5000, device=device())
    for row in range(rows):
        assert torch.isfinite(gumbel(int(params.seed[row]), int(params.position[row]), ids)).all()


def check_token_bitmask(rows: int, vocab_size: int) -> None:
    from finback.kernels.token_bitmask import cuda_triton, reference

    words = torch.randint(-(2**31), 2**31, (rows, -(-vocab_size // 32)), device=device()).int()
    logits = normal(rows, vocab_size)
    found = cuda_triton.token_bitmask(logits, words)
    assert torch.equal(found, reference.token_bitmask(logits, words))


def check_advance_decode() -> None:
    from finback.kernels.advance_decode import cuda_triton, reference

    results = []
    for module in (reference, cuda_triton):
        tensors = [
            torch.tensor(values, dtype=kind, device=device())
            for values, kind in (
                ([11, 12, 13, 14], torch.int32),
                ([1, 2, 3, 4], torch.int32),
                ([5, 0, 7, 8], torch.int32),
                ([5, 0, 7, 8], torch.int64),
                ([0, 0, 2, 1], torch.int32),
                ([4, 4, 3, 4], torch.int32),
            )
        ]
        history = torch.zeros((4, 3), dtype=torch.int32, device=device())
        module.advance_decode(*tensors, history)
        results.append([*tensors, history])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert torch.equal(found, wanted)


def check_step_ops(
    num_slots: int, rows: list[tuple[int, int]], width: int, block_size: int
) -> None:
    """`scatter_words`, `gather_step` and `commit_step` are copies: equal to the word."""
    from finback.kernels.commit_step import cuda_triton as commit
    from finback.kernels.commit_step import reference as plain_commit
    from finback.kernels.gather_step import SlotTensors, new_inputs
    from finback.kernels.gather_step import cuda_triton as gather
    from finback.kernels.gather_step import reference as plain_gather
    from finback.kernels.scatter_words import cuda_triton as scatter
    from finback.kernels.scatter_words import reference as plain_scatter

    generator = torch.Generator().manual_seed(num_slots)
    count = num_slots * (width + 8)
    order = torch.randperm(count, generator=generator)[: count // 2]
    values = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator)
    updates = torch.stack((order, values), dim=1).int().to(device())
    words = [torch.zeros(count, dtype=torch.int32, device=device()) for _ in range(2)]
    scatter.scatter_words(words[0], updates)
    plain_scatter.scatter_words(words[1], updates)
    assert torch.equal(words[0], words[1])

    def small(high: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randint(1, high, (num_slots,), generator=generator).to(kind).to(device())

    slots = SlotTensors(
        last_token=small(1000, torch.int32), seed=small(2**62, torch.int64),
        temperature=small(9, torch.float32), top_k=small(50, torch.int32),
        top_p=small(9, torch.float32), min_p=small(9, torch.float32),
        block_tables=words[0][: num_slots * width].view(num_slots, width),
    )  # fmt: skip
    pairs = torch.tensor(rows, dtype=torch.int32, device=device())
    for with_tables in (True, False):
        found, wanted = (new_inputs(len(rows), width * with_tables, device()) for _ in range(2))
        gather.gather_step(slots, pairs, block_size, found)
        plain_gather.gather_step(slots, pairs, block_size, wanted)
        for name in type(found).__dataclass_fields__:
            one, other = getattr(found, name), getattr(wanted, name)
            assert one is other is None or torch.equal(one, other), name
    sampled = torch.arange(100, 100 + len(rows), dtype=torch.int32, device=device())
    is_finite = torch.arange(len(rows), device=device()) % 3 != 1
    results = []
    for module in (commit, plain_commit):
        last, out = slots.last_token.clone(), torch.full_like(sampled, -7)
        module.commit_step(pairs, sampled, is_finite, last, out)
        results.append((last, out))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
