"""A block as it is stored: its KV in the host layout, and behind it its token ids (int32 LE).

The tokens are compared by whoever reads it, so that a hash that collides never serves wrong KV.
"""

from typing import Final

from finback.shared.kv.layout import BlockGeometry
from finback.shared.wire.messages.control import CacheSpec

_TOKEN_ID_BYTES: Final = 4


def geometry_of(spec: CacheSpec) -> BlockGeometry:
    """The sizes that an instance announced."""
    return BlockGeometry(
        block_size=spec.block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_dtype=spec.kv_dtype,
    )


def payload_bytes(geometry: BlockGeometry) -> int:
    """Length of a stored (full) block."""
    return geometry.block_bytes + _TOKEN_ID_BYTES * geometry.block_size


def write_tokens(payload: memoryview, geometry: BlockGeometry, tokens: bytes) -> None:
    """Write the ids of a full block behind its KV."""
    if (
        len(payload) != payload_bytes(geometry)
        or len(tokens) != len(payload) - geometry.block_bytes
    ):
        raise ValueError(f"{len(payload)} bytes do not hold a stored block")
    payload[geometry.block_bytes :] = tokens


def kv_of(payload: memoryview, geometry: BlockGeometry, tokens: bytes) -> memoryview:
    """The KV of a stored block; ValueError if it is not the block of these tokens."""
    if len(payload) != payload_bytes(geometry):
        raise ValueError(f"{len(payload)} bytes are not a stored block")
    if payload[geometry.block_bytes :] != tokens:
        raise ValueError("the block holds other tokens")
    return payload[: geometry.block_bytes]
