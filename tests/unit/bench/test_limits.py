"""The replay against published limits, and against a slow, obvious twin."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared.bench.limits import Ceilings, ModelCost, model_cost, replay
from finback.shared.bench.workloads import Request, workload
from finback.shared.models.config import ModelConfig

# An H200: device copy 4.28 TB/s, bf16 products 712 TFLOP/s.
H200 = Ceilings(bytes_per_s=4.28e12, flops_per_s=712e12)


def qwen3(hidden: int, layers: int, heads: int, wide: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=wide,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_model_len=40_960,
        tie_word_embeddings=tied,
        qk_norm=True,
    )


SMALL = qwen3(1024, 28, 16, 3072, tied=True)
LARGE = qwen3(4096, 36, 32, 12_288, tied=False)


def cost_of(config: ModelConfig) -> ModelCost:
    """In bf16 throughout."""
    shape = model_cost(config, held_bytes=0, kv_item_bytes=2)
    tables = 1 if config.tie_word_embeddings else 2
    held = 2 * (shape.layer_params + tables * shape.head_params)
    return model_cost(config, held_bytes=held, kv_item_bytes=2)


@pytest.mark.parametrize(
    ("config", "name", "unit", "published"),
    [
        (SMALL, "latency", "out", 3_497),
        (SMALL, "nano", "out", 35_840),
        (SMALL, "decode", "out", 109_300),
        (SMALL, "prefill", "in", 391_000),
        (SMALL, "agent", "s", 0.432),
        (LARGE, "latency", "out", 281),
        (LARGE, "nano", "out", 12_400),
        (LARGE, "decode", "out", 25_100),
        (LARGE, "prefill", "in", 43_660),
        (LARGE, "agent", "s", 1.314),
    ],
)
def test_the_limits_are_those_computed_elsewhere(
    config: ModelConfig, name: str, unit: str, published: float
) -> None:
    requests = workload(name, config.vocab_size)
    cached = [item.num_shared if at >= 4 else 0 for at, item in enumerate(requests)]
    limit_s = replay(requests, cached, cost_of(config), H200).limit_s
    found = {
        "s": limit_s,
        "out": sum(item.num_tokens for item in requests) / limit_s,
        "in": sum(len(item.prompt) for item in requests) / limit_s,
    }[unit]
    assert found == pytest.approx(published, rel=0.015)


def slow_replay(
    requests: list[Request], cached: list[int], cost: ModelCost, ceilings: Ceilings
) -> tuple[int, int, float]:
    """(bytes, FLOPs, seconds), one sequence and one query at a time."""
    num_bytes = flops = 0
    limit_s = 0.0

    def part(part_bytes: int, part_flops: int) -> None:
        nonlocal num_bytes, flops, limit_s
        num_bytes, flops = num_bytes + part_bytes, flops + part_flops
        limit_s += max(part_bytes / ceilings.bytes_per_s, part_flops / ceilings.flops_per_s)

    layer = head = kv = attention = 0
    for request, num_cached in zip(requests, cached, strict=True):
        head += 2 * cost.head_params
        kv += len(request.prompt) * cost.kv_token_bytes
        for position in range(num_cached, len(request.prompt)):
            layer += 2 * cost.layer_params
            kv += cost.kv_token_bytes
            attention += (position + 1) * cost.attention_flops
    part(cost.weights_bytes, layer + head)
    part(kv, attention)
    for step in range(1, max(item.num_tokens for item in requests)):
        rows = [item for item in requests if item.num_tokens > step]
        contexts = [len(item.prompt) + step for item in rows]
        part(cost.weights_bytes, len(rows) * 2 * (cost.layer_params + cost.head_params))
        part(
            sum(contexts) * cost.kv_token_bytes,
            sum(length * cost.attention_flops for length in contexts),
        )
    return num_bytes, flops, limit_s


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 11)),
        min_size=1,
        max_size=6,
    ),
    st.floats(1e2, 1e6),
)
def test_the_replay_equals_its_twin(shapes: list[tuple[int, int, int]], flops: float) -> None:
    requests = [
        Request(prompt=tuple(range(prompt)), num_tokens=tokens) for prompt, tokens, _ in shapes
    ]
    cached = [min(hit, prompt - 1) for prompt, _, hit in shapes]
    cost = ModelCost(
        layer_params=50, head_params=30, weights_bytes=160, kv_token_bytes=12, attention_flops=8
    )
    ceilings = Ceilings(bytes_per_s=1e4, flops_per_s=flops)
    work = replay(requests, cached, cost, ceilings)
    slow_bytes, slow_flops, slow_s = slow_replay(requests, cached, cost, ceilings)
    assert (work.bytes, work.flops) == (slow_bytes, slow_flops)
    assert work.limit_s == pytest.approx(slow_s)
    assert work.num_steps == max(tokens for _, tokens, _ in shapes)


def test_an_embedding_that_is_no_head_is_not_read() -> None:
    tied = model_cost(SMALL, held_bytes=1000, kv_item_bytes=2)
    assert tied.weights_bytes == 1000
    own = model_cost(LARGE, held_bytes=1000, kv_item_bytes=2)
    assert own.weights_bytes < 1000
