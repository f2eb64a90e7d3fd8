"""Lane `shm`, the part that touches memory: fill reserved slots, read the slots of tickets.

A reader copies first and verifies the copy: whatever happens to the slot meanwhile (released,
reused, written by a process that was believed dead), a wrong copy is a `CorruptData`.
"""

from pathlib import Path
from typing import Final

import numpy as np
from anyio import to_thread

from finback.shared.lanes.arena_format import SlotState, read_slot
from finback.shared.lanes.arena_maps import ArenaMaps, MappedExtent
from finback.shared.lanes.base import (
    THREAD_BYTES,
    Buffer,
    CorruptData,
    checksum,
    destination,
    verify,
)
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import Slot

KIND: Final = "shm"


class ArenaReader:
    """Copies blocks out of the arena in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._maps = ArenaMaps(Path(folder), is_writable=False)

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
        extent, index = self._find(ticket)
        try:
            data = memoryview(extent.data)
        except ValueError as error:  # its file is gone, and another reader unmapped it just now
            raise CorruptData("gone", ticket.location) from error
        with data:
            _check_header(data, index, ticket)
            copy_bytes(view, data[ticket.offset : ticket.offset + ticket.length])
            verify(view, ticket)
            _check_header(data, index, ticket)
        return view

    def close(self) -> None:
        """Unmap."""
        self._maps.close()

    def _find(self, ticket: Ticket) -> tuple[MappedExtent, int]:
        try:
            extent = self._maps.get(ticket.location)
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
        self._maps = ArenaMaps(Path(folder), is_writable=True)

    def view(self, slot: Slot) -> memoryview:
        """The memory of a reserved slot, `slot.length` bytes, to be written in place.

        Only valid while the lease is: drop it before the release.
        """
        extent = self._maps.get(slot.location)
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
        copy_bytes(target[: len(source)], source)
        return make_ticket(slot, len(source), checksum(source))

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


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy equal lengths. NumPy's copy gives up the interpreter lock, a memoryview's does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _check_header(data: memoryview, index: int, ticket: Ticket) -> None:
    try:
        header = read_slot(data, index)
    except ValueError as error:
        raise CorruptData("generation", "a damaged slot header") from error
    if header.state is not SlotState.COMMITTED or header.generation != ticket.generation:
        raise CorruptData("generation", "the slot serves somebody else by now")
