"""Block keys: a keyed hash chain over token ids.

The hash of block i covers everything up to its end, so equal hashes mean equal prefixes (the tokens
are compared as well on a hit). Only full blocks have a hash. Torch-free: gateways use this too.
"""

from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

HASH_BYTES: Final = 32

TokenIds = npt.NDArray[np.int32]


def root(key: bytes, salt: bytes) -> bytes:
    """The parent of the first block. `key` is the cluster's secret (at most 64 bytes, may be empty).

    `salt` says whom the blocks fit: model, layout, numerics class, tenant.
    """
    return blake2b(salt, digest_size=HASH_BYTES, key=key, person=b"finback-root").digest()


def prompt_root(key: bytes, cache_salt: bytes, block_size: int) -> bytes:
    """The parent of a prompt's first block, the same for gateways, routers, engines and caches.

    `cache_salt` keeps tenants apart. What the bytes fit (`CacheSpec.salt`) is no part of the chain:
    a block is named by both (ADR 12).
    """
    return root(key, b"%d/%b" % (block_size, cache_salt))


def extend(parent: bytes, block_tokens: bytes, key: bytes) -> bytes:
    """The hash of a full block (`block_tokens`: int32 LE) that follows `parent`."""
    return blake2b(
        parent + block_tokens, digest_size=HASH_BYTES, key=key, person=b"finback-block"
    ).digest()


def chain(token_ids: TokenIds, block_size: int, key: bytes, salt: bytes) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` [num_tokens], 32 bytes each, in order."""
    if block_size < 1:
        raise ValueError(f"block_size must be positive, not {block_size}")
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    return extend_all(root(key, salt), data, block_size, key)


def extend_all(parent: bytes, data: bytes, block_size: int, key: bytes) -> list[bytes]:
    """Hashes of the full blocks of `data` (int32 LE ids) that follow `parent`, in order."""
    width = 4 * block_size
    hashes = []
    for start in range(0, len(data) - width + 1, width):
        parent = extend(parent, data[start : start + width], key)
        hashes.append(parent)
    return hashes
