"""Keys that come from the cluster's secret: its id, and one pair for each segment.

Every key is BLAKE2b of the segment's id, keyed with the secret, with a purpose of its own. So no
two segments share an encryption key, and random nonces within one (at most 2^20 records) collide
with a chance below 2^-57.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final

KEY_ID_BYTES: Final = 16
MAC_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class SegmentKeys:
    """Keys of one segment: `mac` for record headers, `aead` (AES-256) for payloads."""

    mac: bytes
    aead: bytes


class KeyRing:
    """What one cluster's secret (at most 64 bytes, may be empty) gives."""

    def __init__(self, cluster_key: bytes) -> None:
        self._secret = cluster_key
        self.key_id: Final = _derive(cluster_key, b"", b"finback-keyid", KEY_ID_BYTES)
        self.of_segment = lru_cache(maxsize=4096)(self._of_segment)

    @property
    def is_empty(self) -> bool:
        """Whether there is no secret at all."""
        return not self._secret

    def _of_segment(self, segment_id: int) -> SegmentKeys:
        data = segment_id.to_bytes(8, "little")
        return SegmentKeys(
            mac=_derive(self._secret, data, b"finback-segmac", 32),
            aead=_derive(self._secret, data, b"finback-segaes", 32),
        )


def _derive(secret: bytes, data: bytes, purpose: bytes, size: int) -> bytes:
    return blake2b(data, digest_size=size, key=secret, person=purpose).digest()


def mac(key: bytes, data: bytes) -> bytes:
    """A 16-byte keyed hash."""
    return blake2b(data, digest_size=MAC_BYTES, key=key).digest()
