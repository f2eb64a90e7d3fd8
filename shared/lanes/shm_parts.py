"""A block of the arena that is copied in parts, in any order of its bytes' turn, and judged at the end.

    read = BlockRead(reader, ticket)
    read.next(part)                  # the next len(part) bytes; not to be relied on yet
    read.finish()                    # CorruptData: what was copied is not the block

For who wants a block's beginning before its end is there: the checksum covers all of it, so that
nothing that was made from the parts may leave before `finish`.
"""

import xxhash

from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.shm import ArenaReader, check_head
from finback.shared.lanes.ticket import Ticket


class BlockRead:
    """One ticket being read. Belongs to one thread at a time. Raises `CorruptData` anywhere."""

    def __init__(self, reader: ArenaReader, ticket: Ticket) -> None:
        self._ticket = ticket
        self._extent, self._index = reader.find(ticket)
        self._digest = xxhash.xxh3_128()
        self._at = 0
        check_head(self._extent, self._index, ticket)

    def next(self, out: memoryview) -> None:
        """Fill `out` with the bytes that follow; the checksum is that of the copy."""
        if self._at + len(out) > self._ticket.length:
            raise CorruptData("length", f"{self._ticket.length} bytes")
        self._extent.copy_into(self._ticket.offset + self._at, out, self._digest)
        self._at += len(out)

    def finish(self) -> None:
        """All bytes were read, they are those that were written, and the slot is still the block's."""
        if self._at != self._ticket.length:
            raise CorruptData("length", f"{self._at} of {self._ticket.length} bytes")
        if self._digest.digest() != self._ticket.checksum:
            raise CorruptData("checksum", self._ticket.location)
        check_head(self._extent, self._index, self._ticket)
