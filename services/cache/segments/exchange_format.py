"""The file in which a prefix travels from one cluster to another.

    magic, length of the head, head (JSON), then for each block: length, XXH3-128, payload

No key is in it and no hash: every payload ends with the block's token ids, so the other cluster
chains them with its own key. It tells the prompt to whoever reads it.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import BinaryIO, Final

import xxhash

from finback.services.cache.segments.record import MAX_PAYLOAD_BYTES
from finback.shared.errors import InvalidRequest
from finback.shared.lanes.arena_format import MAX_SALT_BYTES

_MAGIC: Final = b"FINBKPX1"
_HEAD: Final = struct.Struct("<8sI")
_BLOCK: Final = struct.Struct("<Q16s")
_MOST_HEAD: Final = 4096
MAX_BLOCKS: Final = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHead:
    """What all blocks of the file share. `salt`: the `CacheSpec.salt` that their bytes fit."""

    salt: str
    block_size: int
    num_blocks: int
    tenant: str = ""
    traffic_class: str = "chat"


def write_head(file: BinaryIO, head: PrefixHead) -> None:
    """Begin a file."""
    text = json.dumps(asdict(head)).encode()
    file.write(_HEAD.pack(_MAGIC, len(text)) + text)


def write_block(file: BinaryIO, payload: memoryview) -> None:
    """Add a block."""
    file.write(_BLOCK.pack(payload.nbytes, xxhash.xxh3_128_digest(payload)))
    file.write(payload)


def read_head(file: BinaryIO) -> PrefixHead:
    """Raises `InvalidRequest`."""
    try:
        magic, length = _HEAD.unpack(file.read(_HEAD.size))
        if magic != _MAGIC or length > _MOST_HEAD:
            raise ValueError("no exported prefix")
        head = PrefixHead(**json.loads(file.read(length)))
        texts = (head.salt, head.tenant, head.traffic_class)
        numbers = (head.block_size, head.num_blocks)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("salt, tenant and traffic_class are texts")
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            raise ValueError("block_size and num_blocks are positive")
        if not 0 < len(head.salt.encode()) <= MAX_SALT_BYTES:
            raise ValueError(f"salt has 1 to {MAX_SALT_BYTES} bytes")
        if head.num_blocks > MAX_BLOCKS:
            raise ValueError(f"more than {MAX_BLOCKS} blocks")
        return head
    except (ValueError, TypeError, struct.error) as error:
        raise InvalidRequest(f"not an exported prefix: {error}", param="file") from None


def read_blocks(file: BinaryIO, head: PrefixHead) -> Iterator[tuple[bytes, bytes]]:
    """(payload, checksum) of each block. Raises `InvalidRequest` where the file is damaged."""
    for number in range(head.num_blocks):
        try:
            length, checksum = _BLOCK.unpack(file.read(_BLOCK.size))
        except struct.error:
            raise InvalidRequest(f"the file ends before block {number}", param="file") from None
        if not 4 * head.block_size < length <= MAX_PAYLOAD_BYTES:
            raise InvalidRequest(f"block {number} has {length} bytes", param="file")
        payload = file.read(length)
        if len(payload) != length or xxhash.xxh3_128_digest(payload) != checksum:
            raise InvalidRequest(f"block {number} of the file is damaged", param="file")
        yield payload, checksum
