"""The nouns of the file tier: a block's record, why it was not found, where it lies."""

from dataclasses import dataclass
from typing import Final, Literal

from finback.shared.errors import InvalidRequest
from finback.shared.kv.block_hash import HASH_BYTES

CHECKSUM_BYTES: Final = 16
MAX_PAYLOAD_BYTES: Final = 256 * 1024 * 1024
# UTF-8 bytes of each text; together with the fixed fields they fit a header page many times.
MAX_TEXT_BYTES: Final = {"salt": 128, "tenant": 256, "traffic_class": 64}

MissReason = Literal["absent", "expired", "corrupt", "io"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """What is known of a kept block. Its payload is the KV, and behind it the token ids.

    `checksum` is XXH3-128 of the payload (16 bytes; empty in listings of an encrypted store, where
    it stays behind the encryption). `first_block`: index of the block in its prompt.
    `expires_unix_s` 0 means that it never expires.
    """

    salt: str
    hash: bytes
    length: int
    checksum: bytes
    expires_unix_s: float
    tenant: str = ""
    traffic_class: str = "chat"
    kind: str = "block"
    created_unix_s: float = 0.0
    used_unix_s: float = 0.0
    first_block: int = 0

    def is_expired(self, now_unix_s: float) -> bool:
        """Whether its time is over."""
        return 0 < self.expires_unix_s <= now_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record lies: `span` bytes, header page included, at `offset` of a segment."""

    segment_id: int
    offset: int
    span: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.span


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A row of the index. `is_packed`: compressed or encrypted, so it cannot be read in place."""

    row_id: int
    record: BlockRecord
    place: Place
    is_packed: bool
    is_own: bool


class Miss(Exception):
    """The block cannot be had; the reader computes it. Never an error of the request."""

    def __init__(self, reason: MissReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: MissReason = reason


def check_record(record: BlockRecord, num_bytes: int) -> None:
    """Raise `InvalidRequest` for what cannot be kept; `num_bytes` is the payload's length."""
    if record.kind != "block":
        raise InvalidRequest(f"files keep blocks, not {record.kind!r}", param="kind")
    if len(record.hash) != HASH_BYTES:
        raise InvalidRequest(f"hash must have {HASH_BYTES} bytes", param="hash")
    if len(record.checksum) != CHECKSUM_BYTES:
        raise InvalidRequest(f"checksum must have {CHECKSUM_BYTES} bytes", param="checksum")
    if record.length != num_bytes or not 0 < num_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidRequest(
            f"length must be the payload's, 1 to {MAX_PAYLOAD_BYTES} bytes", param="length"
        )
    for name, most in MAX_TEXT_BYTES.items():
        if len(getattr(record, name).encode()) > most:
            raise InvalidRequest(f"{name} has more than {most} bytes", param=name)
    if not record.salt:
        raise InvalidRequest("salt is empty", param="salt")
    if record.first_block < 0 or record.expires_unix_s < 0:
        raise InvalidRequest("first_block and expires_unix_s are not negative", param="first_block")
