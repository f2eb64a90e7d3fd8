"""Lane `shm`, the part that touches memory: fill reserved slots, read the slots of tickets.

A reader copies first and verifies the copy: whatever happens to the slot meanwhile (released,
reused, written by a process that was believed dead), a wrong copy is a `CorruptData`.
"""

from pathlib import Path
from typing import Final

import xxhash
from anyio import to_thread

from finback.shared.lanes.arena_format import READABLE
from finback.shared.lanes.arena_maps import ArenaMaps
from finback.shared.lanes.arena_reads import PIECE_BYTES, ArenaReads, OpenExtent
from finback.shared.lanes.base import (
    THREAD_BYTES,
    Buffer,
    CorruptData,
    copy_bytes,
    destination,
)
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import Slot

KIND: Final = "shm"


class ArenaReader:
    """Copies blocks out of the arena in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._reads = ArenaReads(Path(folder))

    async def read(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """The verified bytes of `ticket`, in `out` if given; large copies leave the event loop."""
        if ticket.length < THREAD_BYTES:
            return self.read_now(ticket, out)
        return await to_thread.run_sync(self.read_now, ticket, out)

    def read_now(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """As `read`, on the calling thread."""
        if ticket.kind != KIND:
            raise CorruptData("ticket", f"kind {ticket.kind!r} on lane {KIND!r}")
        view = destination(ticket, out)
        extent, index = self.find(ticket)
        check_head(extent, index, ticket)
        digest = extent.copy(ticket.offset, view)
        if digest != ticket.checksum:
            raise CorruptData("checksum", ticket.location)
        check_head(extent, index, ticket)
        return view

    def close(self) -> None:
        """Let go of the files."""
        self._reads.close()

    def find(self, ticket: Ticket) -> tuple[OpenExtent, int]:
        """The extent of a ticket and the number of its slot; `CorruptData` if there is none."""
        try:
            extent = self._reads.get(ticket.location)
            index = extent.header.slot_index(ticket.offset)
        except OSError as error:
            raise CorruptData("gone", ticket.location) from error
        except ValueError as error:
            raise CorruptData("ticket", str(error)) from error
        if ticket.length > extent.header.slot_bytes:
            raise CorruptData("ticket", "longer than its slot")
        return extent, index


class ArenaWriter:
    """Fills slots that the cache service reserved for this process."""

    def __init__(self, folder: str | Path) -> None:
        self._maps = ArenaMaps(Path(folder))

    def view(self, slot: Slot) -> memoryview:
        """The memory of a reserved slot, `slot.length` bytes, to be written in place.

        Only valid while the lease is: drop it before the release.
        """
        extent = self._maps.get(slot.location)
        if not extent.is_whole():  # touching it would kill this process
            raise ValueError(f"{slot.location} was truncated")
        extent.header.slot_index(slot.offset)
        if slot.length > extent.header.slot_bytes:
            raise ValueError("the slot is longer than its extent allows")
        return memoryview(extent.data)[slot.offset : slot.offset + slot.length]

    def write(self, slot: Slot, data: Buffer) -> Ticket:
        """Copy `data` into `slot`. The checksum is that of the source, not of the arena."""
        source = memoryview(data).cast("B")
        target = self.view(slot)
        if len(source) > len(target):
            raise ValueError(f"{len(source)} bytes do not fit a slot of {len(target)}")
        digest = xxhash.xxh3_128()
        for at in range(0, len(source), PIECE_BYTES):
            piece = source[at : at + PIECE_BYTES]
            copy_bytes(target[at : at + len(piece)], piece)
            digest.update(piece)
        return make_ticket(slot, len(source), digest.digest())

    def close(self) -> None:
        """Unmap what nobody has a view of."""
        self._maps.close()


def make_ticket(slot: Slot, length: int, digest: bytes) -> Ticket:
    """The ticket of a written slot; valid once the cache has committed it."""
    return Ticket(
        kind=KIND,
        location=slot.location,
        offset=slot.offset,
        length=length,
        checksum=digest,
        generation=slot.generation,
    )


def check_head(extent: OpenExtent, index: int, ticket: Ticket) -> None:
    """`CorruptData` unless the slot still is the ticket's."""
    state, generation = extent.slot_head(index)
    if state not in READABLE or generation != ticket.generation:
        raise CorruptData("generation", "the slot serves somebody else by now")
