"""A step that comes in parts of its layers computes the same bits, and asks before each part."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.models.kv_pool import KVPool
from finback.shared.models.layer_gate import LayerRange, in_parts
from support.forward_batches import Chunk, flat_batch
from support.tiny_model import CONFIG, tiny_model, tiny_stack

BLOCK = 64


@dataclass(slots=True)
class Late:
    """The KV of earlier tokens comes at the last moment, and only what was asked for."""

    pool: KVPool
    packed: bytes
    num_there: int = 0
    asked: list[int] = field(default_factory=list)

    def ranges(self, num_layers: int) -> Sequence[LayerRange]:
        return in_parts(num_layers, num_layers)

    def wait(self, end: int) -> None:
        self.asked.append(end)
        layer_bytes = len(self.packed) // self.pool.num_layers
        for layer in range(self.num_there, end):
            part = bytearray(self.packed[layer * layer_bytes : (layer + 1) * layer_bytes])
            self.pool.unpack_layers(0, layer, layer + 1, memoryview(part))
        self.num_there = end


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
@pytest.mark.parametrize("make", [tiny_model, tiny_stack])
@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_layers_may_come_one_by_one(make, mode: str, num_rows: int) -> None:  # type: ignore[no-untyped-def]  # either maker
    model = make(mode)
    draw = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(0, CONFIG.vocab_size, (BLOCK + num_rows,), generator=draw).tolist()
    known = model.new_pool(3, BLOCK)
    model.forward(flat_batch([Chunk(token_ids=tokens[:BLOCK], blocks=[0, 1])], BLOCK), known)
    packed = bytearray(known.block_bytes)
    known.pack_block(0, BLOCK, memoryview(packed))
    batch = flat_batch([Chunk(token_ids=tokens[BLOCK:], first=BLOCK, blocks=[0, 1])], BLOCK)
    wanted = model.forward(batch, known).clone()
    late = Late(pool=model.new_pool(3, BLOCK), packed=bytes(packed))
    found = model.forward(replace(batch, gate=late), late.pool)
    assert torch.equal(found, wanted)
    assert late.asked == list(range(1, CONFIG.num_layers + 1))


@given(num_layers=st.integers(1, 90), num_parts=st.integers(1, 12))
def test_parts_follow_one_another(num_layers: int, num_parts: int) -> None:
    parts = in_parts(num_layers, num_parts)
    assert [layer for first, end in parts for layer in range(first, end)] == [*range(num_layers)]
    assert len(parts) == min(num_layers, num_parts)
    sizes = [end - first for first, end in parts]
    assert max(sizes) - min(sizes) <= 1
