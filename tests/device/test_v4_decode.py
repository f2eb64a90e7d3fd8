"""A V4 decoding step on an NVIDIA device, in a graph, against the network in plain torch."""

import importlib.util
from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from finback.kernels.expert_mlp_fp4.reference import unpack
from finback.shared.models.deepseek_v4.config import V4Config
from finback.shared.models.deepseek_v4.memory import LayerMemory, Tail, V4Memory
from finback.shared.models.deepseek_v4.network import V4Network
from finback.shared.models.deepseek_v4.random_weights import RandomV4
from finback.shared.models.deepseek_v4.weights import V4Weights
from support.v4_steps import step

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton here"),
]

CONFIG: Final = V4Config(
    vocab_size=500,
    hidden_size=256,
    num_layers=4,
    num_heads=16,
    head_dim=64,
    rope_dim=16,
    q_rank=128,
    num_output_groups=2,
    output_rank=64,
    window=16,
    ratios=(0, 4, 128, 4),
    index_num_heads=16,
    index_head_dim=32,
    index_top_k=128,
    num_experts=8,
    num_shared_experts=1,
    # All of them: a choice near a tie would fall otherwise in 8 bits, and change everything.
    num_experts_per_token=8,
    expert_size=128,
    num_hash_layers=1,
    routed_scaling=1.5,
    swiglu_limit=10.0,
    num_streams=4,
    sinkhorn_iterations=20,
    hyper_eps=1e-6,
    norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=None,
    max_model_len=512,
)
LENGTHS: Final = (3, 120, 126, 253)
BLOCKS: Final = ([1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12])


@torch.no_grad()
def test_steps_equal_the_reference() -> None:
    from finback.shared.models.deepseek_v4.cuda_decode import CudaDecoder
    from finback.shared.models.deepseek_v4.cuda_weights import cuda_layer

    draw = RandomV4(CONFIG, dtype=torch.float32)
    layers, fused = [], []
    for index in range(CONFIG.num_layers):
        layer, (gate_up, down) = draw.layer(index), draw.experts()
        mixture = replace(layer.mixture, expert_gate_up=unpack(gate_up), expert_down=unpack(down))
        layers.append(replace(layer, mixture=mixture))
        fused.append(moved(cuda_layer(CONFIG, layer, gate_up, down)))
    weights = V4Weights(
        embedding=draw.matrix(CONFIG.vocab_size, CONFIG.hidden_size) * 16,
        layers=tuple(layers),
        head_mix=draw.hyper(4, 1),
        norm=draw.norm(CONFIG.hidden_size),
        head=draw.matrix(CONFIG.vocab_size, CONFIG.hidden_size),
    )
    network = V4Network(CONFIG, weights)
    memory = V4Memory(CONFIG, num_blocks=13, num_slots=4)
    tokens = torch.randint(2, 500, (4, 300), generator=torch.Generator().manual_seed(3))
    for row, length in enumerate(LENGTHS):
        network.forward(step((tokens[row, :length], 0, row, BLOCKS[row])), memory)
    decoder = CudaDecoder(
        CONFIG,
        tuple(fused),
        embedding=weights.embedding.bfloat16().cuda(),
        head_mix=moved(weights.head_mix),
        norm=weights.norm.bfloat16().cuda(),
        head=weights.head.bfloat16().cuda(),
        max_context=384,
    )
    on_device = tuple(copied(layer) for layer in memory.layers)
    positions = torch.tensor(LENGTHS).cuda()
    ids = torch.zeros(4, dtype=torch.int64).cuda()
    slots, blocks = torch.arange(4).cuda(), torch.tensor(BLOCKS).cuda()

    def run() -> torch.Tensor:
        return decoder.step(ids, decoder.tables(positions, slots, blocks, on_device), on_device)

    saved = [table.clone() for layer in on_device for table in tables(layer)]
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()
    for layer_table, kept in zip(
        (table for layer in on_device for table in tables(layer)), saved, strict=True
    ):
        layer_table.copy_(kept)
    for at in range(12):
        parts = [
            (tokens[row, length + at : length + at + 1], length + at, row, BLOCKS[row])
            for row, length in enumerate(LENGTHS)
        ]
        expected = network.logits(network.forward(step(*parts), memory))
        positions.copy_(torch.tensor(LENGTHS) + at)
        ids.copy_(torch.stack([ids for ids, *_ in parts])[:, 0])
        graph.replay()
        found = logits.float().cpu()
        agreement = torch.nn.functional.cosine_similarity(found, expected, dim=1)
        assert float(agreement.min()) > 0.99, (at, agreement)


def moved(weights: Any) -> Any:
    """The same on the device; what steers stays float32, matrices and norms become bfloat16."""
    from dataclasses import fields, is_dataclass

    kept = ("fn", "base", "scale", "sinks", "position_bias", "bias", "factors")

    def one(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            is_wide = value.dtype == torch.float32 and name not in kept
            return (value.bfloat16() if is_wide else value).cuda()
        if isinstance(value, tuple):
            names = getattr(value, "_fields", ("",) * len(value))
            made = [one(n, v) for n, v in zip(names, value, strict=True)]
            return type(value)(*made)
        if is_dataclass(value) and not isinstance(value, type):
            named = {
                field.name: one(field.name, getattr(value, field.name)) for field in fields(value)
            }
            return type(value)(**named)
        return value

    return one("", weights)


def tables(layer: LayerMemory) -> list[torch.Tensor]:
    found = [layer.ring]
    for tail in (layer.tail, layer.index_tail):
        found += [] if tail is None else [tail.contents, tail.gates]
    return found + [t for t in (layer.entries, layer.index_keys) if t is not None]


def copied(layer: LayerMemory) -> LayerMemory:
    """On the device, in bfloat16; tails stay float32."""

    def table(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.bfloat16().cuda()

    def tail(value: Tail | None) -> Tail | None:
        if value is None:
            return None
        return replace(value, contents=value.contents.cuda(), gates=value.gates.cuda())

    ring = table(layer.ring)
    assert ring is not None
    return replace(
        layer,
        ring=ring,
        entries=table(layer.entries),
        index_keys=table(layer.index_keys),
        tail=tail(layer.tail),
        index_tail=tail(layer.index_tail),
    )
