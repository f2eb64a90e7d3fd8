"""The bytes of an arena file (an *extent*): a header page, a table of slot headers, the slots.

The cache service alone writes headers; workers map the same files, write the slots they reserved
and read the slots of their tickets. Every offset below is in bytes from the start of the file.

A slot header changes state by **one byte, written last**: a process killed at any point leaves
either the old state or the new one, and fields that only matter in the state not yet reached. What
changes while a block is kept (expiry, last use, pin, lease) is one aligned field each, of which the
old and the new value are both good; what may not change is under a seal that a scan checks.
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import xxhash

MAGIC: Final = b"FINBKAR2"  # 2: headers of 512 bytes, with a kept block's label
SLOT_MAGIC: Final = b"FBSL"
PAGE: Final = 4096
SLOT_HEADER_BYTES: Final = 512
MAX_OWNER_BYTES: Final = 64
MAX_SALT_BYTES: Final = 64
MAX_SLOTS: Final = 1 << 20

# magic, extent_id, slot_bytes, num_slots, data_offset
_EXTENT: Final = struct.Struct("<8sQQQQ")
# magic, state, owner length, salt length, kind, generation, owner_epoch, length, lease_ms,
# expiry_s, used_s, seal, retention_s, block_index, traffic class, is_pinned,
# checksum, lease, tenant, hash, owner, salt
_SLOT: Final = struct.Struct("<4sBBBBQQQQddQIIBB6x16s16s16s32s64s64s")
_SEALED: Final = struct.Struct("<QQIB16s16s32s")
_HEAD: Final = struct.Struct("<4sBxxxQ")
_STATE_OFFSET: Final = 4


class SlotState(IntEnum):
    """Whose a slot is."""

    FREE = 0
    RESERVED = 1  # a writer fills it
    COMMITTED = 2  # readers may copy it
    QUARANTINED = 3  # its writer's lease ran out, but the writer may still be writing
    KEPT = 4  # found by its label; readers may copy it


READABLE: Final = frozenset({SlotState.COMMITTED, SlotState.KEPT})


class BlockKind(IntEnum):
    """What a kept slot holds."""

    BLOCK = 0
    STATE = 1


class TrafficClass(IntEnum):
    """Whose request a block was computed for; the lower, the sooner it is given up."""

    BATCH = 0
    CHAT = 1
    AGENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtentHeader:
    """The geometry of one extent: `num_slots` slots of `slot_bytes` from `data_offset` on."""

    extent_id: int
    slot_bytes: int
    num_slots: int
    data_offset: int

    @property
    def file_bytes(self) -> int:
        """The length of the whole file."""
        return self.data_offset + self.num_slots * self.slot_bytes

    @property
    def name(self) -> str:
        """The file's name in the arena folder; never used again once the file is gone."""
        return f"extent-{self.extent_id:010x}"

    def slot_offset(self, index: int) -> int:
        """Where the payload of slot `index` starts."""
        return self.data_offset + index * self.slot_bytes

    def slot_index(self, offset: int) -> int:
        """The slot whose payload starts at `offset`; ValueError if none does."""
        index, rest = divmod(offset - self.data_offset, self.slot_bytes)
        if rest or not 0 <= index < self.num_slots:
            raise ValueError(f"no slot at offset {offset}")
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLabel:
    """What a slot is kept as: named by (`salt`, `kind`, `hash`), and how long it is worth keeping.

    `hash` has 32 bytes, `tenant` is a digest of 16. `block_index`: its place in the prompt.
    """

    salt: str
    hash: bytes
    kind: BlockKind = BlockKind.BLOCK
    block_index: int = 0
    tenant: bytes = bytes(16)
    traffic_class: TrafficClass = TrafficClass.CHAT
    retention_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    """One slot's entry in the table. `length`: payload bytes, known once committed.

    `expiry_s` and `used_s` are wall-clock seconds; an expiry of 0 is none.
    """

    state: SlotState = SlotState.FREE
    generation: int = 0
    owner: str = ""
    owner_epoch: int = 0
    lease_id: str = ""
    lease_ms: int = 0
    length: int = 0
    checksum: bytes = b""
    label: BlockLabel | None = None
    expiry_s: float = 0.0
    used_s: float = 0.0
    is_pinned: bool = False


_NO_LABEL: Final = BlockLabel(salt="", hash=bytes(32), traffic_class=TrafficClass.BATCH)


def plan_extent(extent_id: int, slot_bytes: int, file_bytes: int) -> ExtentHeader | None:
    """The extent of whole slots that fits into `file_bytes`; None if not even one does."""
    num_slots = min(MAX_SLOTS, max(0, file_bytes - PAGE) // (slot_bytes + SLOT_HEADER_BYTES))
    while num_slots > 0:
        table_end = PAGE + num_slots * SLOT_HEADER_BYTES
        header = ExtentHeader(
            extent_id=extent_id,
            slot_bytes=slot_bytes,
            num_slots=num_slots,
            data_offset=-(-table_end // PAGE) * PAGE,
        )
        if header.file_bytes <= file_bytes:
            return header
        num_slots -= 1
    return None


def pack_extent(header: ExtentHeader) -> bytes:
    """The first bytes of the file."""
    return _EXTENT.pack(
        MAGIC, header.extent_id, header.slot_bytes, header.num_slots, header.data_offset
    )


def parse_extent(head: bytes | memoryview, file_bytes: int) -> ExtentHeader:
    """Read and check the header of a file of `file_bytes`; ValueError says what is wrong."""
    if len(head) < _EXTENT.size:
        raise ValueError("too short for an extent header")
    magic, extent_id, slot_bytes, num_slots, data_offset = _EXTENT.unpack_from(head)
    if magic != MAGIC:
        raise ValueError("not an arena extent of this version")
    header = ExtentHeader(
        extent_id=extent_id, slot_bytes=slot_bytes, num_slots=num_slots, data_offset=data_offset
    )
    if not 0 < num_slots <= MAX_SLOTS or slot_bytes < PAGE:
        raise ValueError("impossible geometry")
    if data_offset < PAGE + num_slots * SLOT_HEADER_BYTES or header.file_bytes != file_bytes:
        raise ValueError("the file's length does not fit its header")
    return header


def table_offset(index: int) -> int:
    """Where the header of slot `index` lies."""
    return PAGE + index * SLOT_HEADER_BYTES


def write_slot(table: memoryview, index: int, header: SlotHeader) -> None:
    """Write a slot's header into the mapped file; the state byte goes last."""
    owner = header.owner.encode()[:MAX_OWNER_BYTES]
    label = header.label or _NO_LABEL
    salt = label.salt.encode()
    at = table_offset(index)
    packed = _SLOT.pack(
        SLOT_MAGIC,
        header.state,
        len(owner),
        len(salt),
        label.kind,
        header.generation,
        header.owner_epoch,
        header.length,
        header.lease_ms,
        header.expiry_s,
        header.used_s,
        _seal(header, label, salt) if header.state in READABLE else 0,
        label.retention_s,
        label.block_index,
        label.traffic_class,
        header.is_pinned,
        header.checksum,
        bytes.fromhex(header.lease_id),
        label.tenant,
        label.hash,
        owner,
        salt,
    )
    if header.state in (SlotState.FREE, SlotState.QUARANTINED):
        table[at + _STATE_OFFSET] = header.state
    table[at : at + _STATE_OFFSET] = packed[:_STATE_OFFSET]
    table[at + _STATE_OFFSET + 1 : at + _SLOT.size] = packed[_STATE_OFFSET + 1 :]
    table[at + _STATE_OFFSET] = header.state


def _seal(header: SlotHeader, label: BlockLabel, salt: bytes) -> int:
    fixed = _SEALED.pack(
        header.generation,
        header.length,
        label.block_index,
        label.kind,
        header.checksum,
        label.tenant,
        label.hash,
    )
    return xxhash.xxh3_64_intdigest(fixed + salt)


def parse_head(head: bytes | memoryview) -> tuple[int, int]:
    """(state, generation) from a slot header's first 16 bytes, all that a reader asks.

    ValueError if they make no sense.
    """
    if len(head) < _HEAD.size:
        raise ValueError("too short for a slot header")
    magic, state, generation = _HEAD.unpack_from(head)
    if magic != SLOT_MAGIC:
        raise ValueError("a damaged slot header")
    return state, generation


def read_head(table: bytes | memoryview, index: int) -> tuple[int, int]:
    """As `parse_head`, of a slot of this table."""
    return parse_head(table[table_offset(index) : table_offset(index) + _HEAD.size])


def read_slot(table: bytes | memoryview, index: int, *, is_sealed: bool = False) -> SlotHeader:
    """Read a slot's header; ValueError if it makes no sense.

    `is_sealed`: a readable slot whose seal does not fit makes no sense either.
    """
    (
        magic,
        state,
        owner_len,
        salt_len,
        kind,
        generation,
        epoch,
        length,
        lease_ms,
        expiry_s,
        used_s,
        seal,
        retention_s,
        block_index,
        traffic_class,
        pinned,
        check,
        lease,
        tenant,
        digest,
        owner,
        salt,
    ) = _SLOT.unpack_from(table, table_offset(index))
    if magic != SLOT_MAGIC or owner_len > MAX_OWNER_BYTES or salt_len > MAX_SALT_BYTES:
        raise ValueError(f"slot {index} has a damaged header")
    label = None
    if salt_len:
        label = BlockLabel(
            salt=salt[:salt_len].decode(),
            hash=digest,
            kind=BlockKind(kind),
            block_index=block_index,
            tenant=tenant,
            traffic_class=TrafficClass(traffic_class),
            retention_s=retention_s,
        )
    header = SlotHeader(
        state=SlotState(state),
        generation=generation,
        owner=owner[:owner_len].decode(),
        owner_epoch=epoch,
        lease_id=lease.hex() if any(lease) else "",
        lease_ms=lease_ms,
        length=length,
        checksum=check if any(check) else b"",
        label=label,
        expiry_s=expiry_s,
        used_s=used_s,
        is_pinned=bool(pinned),
    )
    if is_sealed and header.state in READABLE:
        sealed = _seal(header, label or _NO_LABEL, salt[:salt_len])
        if sealed != seal or not math.isfinite(expiry_s) or not math.isfinite(used_s):
            raise ValueError(f"slot {index} has a damaged header")
    return header
