"""Token bitmasks in few bytes: a grammar often allows one token, or the same ones again.

Each mask is a uint16 and what it says: up to 32,767, that many token ids (int32) follow; `_SAME`, a
uint16 with the index of an equal mask before it; `_WHOLE`, the bitmask as it is. Little endian.
"""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

_HEAD: Final = struct.Struct("<H")
_SAME: Final = 0xFFFE
_WHOLE: Final = 0xFFFF
_MAX_IDS: Final = 64
_MAX_MASKS: Final = 1024


def only_token(bitmask: bytes) -> int | None:
    """The one token that a bitmask allows; None if it allows none or several."""
    some = bitmask.strip(b"\0")
    if len(some) != 1 or some[0] & (some[0] - 1):
        return None
    return 8 * bitmask.index(some) + some[0].bit_length() - 1


def pack_masks(masks: Sequence[bytes]) -> bytes:
    """In their order; all have the same length, a multiple of 4."""
    seen: dict[bytes, int] = {}
    parts: list[bytes] = []
    for index, mask in enumerate(masks):
        if mask in seen:
            parts += (_HEAD.pack(_SAME), _HEAD.pack(seen[mask]))
            continue
        seen[mask] = index
        ids = _few_ids(mask)
        if ids is None:
            parts += (_HEAD.pack(_WHOLE), mask)
        else:
            parts += (_HEAD.pack(ids.size), ids.astype("<i4").tobytes())
    return b"".join(parts)


def unpack_masks(data: bytes, num_masks: int, mask_bytes: int) -> tuple[bytes, ...]:
    """The masks again. Raises `ValueError` if the bytes are not `num_masks` masks of that length."""
    masks: list[bytes] = []
    start = 0
    try:
        for _ in range(min(num_masks, _MAX_MASKS)):
            mask, start = _unpack(data, start, masks, mask_bytes)
            masks.append(mask)
    except (struct.error, IndexError) as error:
        raise ValueError(f"packed masks end early: {error}") from error
    if start != len(data) or len(masks) != num_masks:
        raise ValueError(f"{len(data)} bytes are not {num_masks} packed masks")
    return tuple(masks)


def _unpack(data: bytes, start: int, before: list[bytes], mask_bytes: int) -> tuple[bytes, int]:
    (head,) = _HEAD.unpack_from(data, start)
    start += _HEAD.size
    if head == _SAME:
        (index,) = _HEAD.unpack_from(data, start)
        return before[index], start + _HEAD.size
    end = start + (mask_bytes if head == _WHOLE else 4 * head)
    if end > len(data):
        raise IndexError("of a mask")
    if head == _WHOLE:
        return data[start:end], end
    mask = bytearray(mask_bytes)
    for token_id in np.frombuffer(data[start:end], dtype="<i4").tolist():
        if token_id < 0:
            raise IndexError("a negative token id")
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask), end


def _few_ids(mask: bytes) -> "np.ndarray[tuple[int], np.dtype[np.int64]] | None":
    """The allowed tokens if they are few."""
    words = np.frombuffer(mask, dtype="<u4")
    where = np.flatnonzero(words)
    if where.size > _MAX_IDS:
        return None
    bits = np.unpackbits(words[where].view(np.uint8), bitorder="little").reshape(-1, 32)
    row, bit = np.nonzero(bits)
    return None if row.size > _MAX_IDS else where[row] * 32 + bit
