"""Packing of KV blocks: one host layout, whatever the pool's own."""

from typing import Literal

import pytest
import torch

from finback.shared.errors import ConfigError
from finback.shared.models.kv_pool import KVPool

Layout = Literal["token_major", "head_major"]


def _pool(layout: Layout, kv_dtype: str = "f32") -> KVPool:
    return KVPool(
        num_blocks=3,
        block_size=8,
        num_layers=2,
        num_kv_heads=2,
        head_dim=4,
        kv_dtype=kv_dtype,
        layout=layout,
    )


def _fill(pool: KVPool, block: int) -> None:
    values = torch.arange(2 * 2 * 8 * 2 * 4).float().view(2, 2, 8, 2, 4)
    for layer in range(2):
        k, v = pool.token_major(layer)
        k[block], v[block] = values[layer, 0], values[layer, 1]


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_both_layouts_pack_to_the_same_bytes(kv_dtype: str, num_tokens: int) -> None:
    packed = []
    for layout in ("token_major", "head_major"):
        pool = _pool(layout, kv_dtype)
        _fill(pool, 1)
        out = bytearray(pool.num_bytes(num_tokens))
        pool.pack_block(1, num_tokens, memoryview(out))
        packed.append(bytes(out))
    assert packed[0] == packed[1]
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[kv_dtype]
    host = torch.frombuffer(bytearray(packed[0]), dtype=dtype).view(2, 2, num_tokens, 2, 4)
    values = torch.arange(256).view(2, 2, 8, 2, 4)
    assert torch.equal(host, values[:, :, :num_tokens].to(dtype))


@pytest.mark.parametrize("layout", ["token_major", "head_major"])
def test_unpack_is_the_inverse_and_touches_nothing_else(layout: Layout) -> None:
    source, target = _pool(layout), _pool(layout)
    _fill(source, 0)
    out = bytearray(source.num_bytes(5))
    source.pack_block(0, 5, out)
    target.unpack_block(2, 5, bytes(out))  # a read-only buffer
    for layer in range(2):
        for mine, theirs in zip(target.token_major(layer), source.token_major(layer), strict=True):
            assert torch.equal(mine[2, :5], theirs[0, :5])
            assert not mine[2, 5:].any()
            assert not mine[:2].any()


def test_copy_block() -> None:
    pool = _pool("head_major")
    _fill(pool, 0)
    pool.copy_block(0, 2)
    assert torch.equal(pool.k[:, 0], pool.k[:, 2])
    assert torch.equal(pool.v[:, 0], pool.v[:, 2])


def test_wrong_sizes_are_refused() -> None:
    pool = _pool("token_major")
    with pytest.raises(ValueError, match="do not hold 3 tokens"):
        pool.pack_block(0, 3, bytearray(7))
    with pytest.raises(ValueError, match="blocks hold 8"):
        pool.pack_block(0, 9, bytearray(pool.num_bytes(9)))
    with pytest.raises(ConfigError, match="kv_dtype is 'int3'"):
        _pool("token_major", "int3")


def test_layers_of_a_block_lie_side_by_side() -> None:
    """So the first blocks of a pool touch a part of its memory, not a page of every layer."""
    pool = _pool("head_major")
    for part in (pool.k, pool.v):
        assert part.stride(1) == pool.num_layers * part.stride(0)


def test_touching_changes_nothing() -> None:
    pool = KVPool(
        num_blocks=6,
        block_size=64,
        num_layers=3,
        num_kv_heads=2,
        head_dim=32,
        kv_dtype="f16",
        layout="head_major",
    )
    pool.k[:, 2].fill_(1.5)
    before = pool.k.clone(), pool.v.clone()
    pool.touch(1, 6)
    assert torch.equal(pool.k, before[0]) and torch.equal(pool.v, before[1])
    assert not pool.touch(3, 3)
