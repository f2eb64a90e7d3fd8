"""Frames between the service and its workers: length (uint32 LE), kind (a byte), body."""

import json
import socket
import struct
from typing import Any, Final

_HEAD: Final = struct.Struct("<IB")
HEAD_BYTES: Final = _HEAD.size
MAX_BODY_BYTES: Final = 64 * 2**20

# To a worker
COMPILE: Final = 1  # {"grammar_id", "kind", "text", "strictness"}
LOAD: Final = 2  # {"grammar_id", "text"}: the engine's own form
MASKS: Final = 3  # MaskRequest; each row is answered by a MASK, in this order
DROP: Final = 4  # {"grammar_id"}
# From a worker
HELLO: Final = 16  # {"pid"}
COMPILED: Final = 17  # a verdict: what it took, or why not
MASK: Final = 18  # Mask


def pack(kind: int, body: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(len(body), kind) + body


def pack_json(kind: int, value: dict[str, Any]) -> bytes:
    """One frame whose body is JSON; half a surrogate pair survives it."""
    return pack(kind, json.dumps(value).encode())


def unpack_head(head: bytes | bytearray, offset: int = 0) -> tuple[int, int]:
    """(body bytes, kind). Raises `ValueError` for a length that no frame has."""
    size, kind = _HEAD.unpack_from(head, offset)
    if size > MAX_BODY_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return size, kind


def read_frame(connection: socket.socket) -> tuple[int, bytes] | None:
    """(kind, body) of the next frame, waiting for it; None at the end."""
    head = _read(connection, HEAD_BYTES)
    if head is None:
        return None
    size, kind = unpack_head(head)
    body = _read(connection, size)
    return None if body is None else (kind, body)


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts, missing = [], size
    while missing:
        part = connection.recv(min(missing, 2**20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
