"""What the prompts and pools of the router's benchmarks look like."""

import random
from typing import Final

from finback.shared.wire.messages.control import CacheSpec

NUM_DOCUMENTS: Final = 24
NUM_BLOCKS: Final = 859
NUM_WORKERS: Final = 8
NUM_STRANGERS: Final = 4_000
SPEC: Final = CacheSpec(
    block_size=64,
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    kv_dtype="bf16",
    block_bytes=8 * 2**20,
    salt="s",
)


def document(number: int) -> bytes:
    """The joined hashes of a prompt that is asked about again and again."""
    return random.Random(number).randbytes(32 * NUM_BLOCKS)
