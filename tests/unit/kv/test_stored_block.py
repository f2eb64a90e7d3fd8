"""A block as it is stored: KV, then tokens."""

import pytest

from finback.shared.kv.layout import BlockGeometry
from finback.shared.kv.stored_block import kv_of, payload_bytes, write_tokens

GEOMETRY = BlockGeometry(block_size=4, num_layers=2, num_kv_heads=1, head_dim=2, kv_dtype="f32")


def test_the_tokens_lie_behind_the_kv_and_are_compared() -> None:
    payload = memoryview(bytearray(payload_bytes(GEOMETRY)))
    assert len(payload) == GEOMETRY.block_bytes + 16
    tokens = bytes(range(16))
    payload[:3] = b"abc"
    write_tokens(payload, GEOMETRY, tokens)
    kv = kv_of(payload, GEOMETRY, tokens)
    assert len(kv) == GEOMETRY.block_bytes and bytes(kv[:3]) == b"abc"
    with pytest.raises(ValueError, match="other tokens"):
        kv_of(payload, GEOMETRY, bytes(16))
    with pytest.raises(ValueError, match="not a stored block"):
        kv_of(payload[:-1], GEOMETRY, tokens)
    with pytest.raises(ValueError, match="do not hold"):
        write_tokens(payload, GEOMETRY, tokens[:-1])
