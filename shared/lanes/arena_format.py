"""The bytes of an arena file (an *extent*): a header page, a table of slot headers, the slots.

The cache service alone writes headers; workers map the same files, write the slots they reserved
and read the slots of their tickets. Every offset below is in bytes from the start of the file.

A slot header changes state by **one byte, written last**: a process killed at any point leaves
either the old state or the new one, and fields that only matter in the state not yet reached.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

MAGIC: Final = b"FINBKAR1"
SLOT_MAGIC: Final = b"FBSL"
PAGE: Final = 4096
SLOT_HEADER_BYTES: Final = 256
MAX_OWNER_BYTES: Final = 64
MAX_SLOTS: Final = 1 << 20

# magic, extent_id, slot_bytes, num_slots, data_offset
_EXTENT: Final = struct.Struct("<8sQQQQ")
# magic, state, owner length, generation, owner_epoch, length, lease_ms, checksum, lease, owner
_SLOT: Final = struct.Struct("<4sBBxxQQQQ16s16s64s")
_STATE_OFFSET: Final = 4


class SlotState(IntEnum):
    """Whose a slot is."""

    FREE = 0
    RESERVED = 1  # a writer fills it
    COMMITTED = 2  # readers may copy it
    QUARANTINED = 3  # its writer's lease ran out, but the writer may still be writing


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
class SlotHeader:
    """One slot's entry in the table. `length`: payload bytes, known once committed."""

    state: SlotState = SlotState.FREE
    generation: int = 0
    owner: str = ""
    owner_epoch: int = 0
    lease_id: str = ""
    lease_ms: int = 0
    length: int = 0
    checksum: bytes = b""


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
    at = table_offset(index)
    packed = _SLOT.pack(
        SLOT_MAGIC,
        header.state,
        len(owner),
        header.generation,
        header.owner_epoch,
        header.length,
        header.lease_ms,
        header.checksum,
        bytes.fromhex(header.lease_id),
        owner,
    )
    if header.state in (SlotState.FREE, SlotState.QUARANTINED):
        table[at + _STATE_OFFSET] = header.state
    table[at : at + _STATE_OFFSET] = packed[:_STATE_OFFSET]
    table[at + _STATE_OFFSET + 1 : at + _SLOT.size] = packed[_STATE_OFFSET + 1 :]
    table[at + _STATE_OFFSET] = header.state


def read_slot(table: bytes | memoryview, index: int) -> SlotHeader:
    """Read a slot's header; ValueError if it makes no sense."""
    magic, state, owner_len, generation, epoch, length, lease_ms, check, lease, owner = (
        _SLOT.unpack_from(table, table_offset(index))
    )
    if magic != SLOT_MAGIC or owner_len > MAX_OWNER_BYTES:
        raise ValueError(f"slot {index} has a damaged header")
    return SlotHeader(
        state=SlotState(state),
        generation=generation,
        owner=owner[:owner_len].decode(),
        owner_epoch=epoch,
        lease_id=lease.hex() if any(lease) else "",
        lease_ms=lease_ms,
        length=length,
        checksum=check if any(check) else b"",
    )
