"""Lane `inline`: the ticket carries the bytes. For what is small."""

from typing import Final

from finback.shared.errors import PayloadTooLarge
from finback.shared.lanes.base import Buffer, CorruptData, checksum, destination, verify
from finback.shared.lanes.ticket import Ticket

MAX_INLINE_BYTES: Final = 64 * 1024


class InlineLane:
    """Both ends of the inline lane; it holds no state."""

    kind: Final = "inline"

    async def put(self, data: Buffer) -> Ticket:
        """A ticket with a copy of `data`; refused above 64 KiB, so that messages stay small."""
        if len(data) > MAX_INLINE_BYTES:
            raise PayloadTooLarge(f"{len(data)} bytes; a ticket holds at most {MAX_INLINE_BYTES}")
        payload = bytes(data)
        return Ticket(
            kind=self.kind, length=len(payload), checksum=checksum(payload), payload=payload
        )

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """The payload, verified."""
        if ticket.kind != self.kind:
            raise CorruptData("ticket", f"kind {ticket.kind!r} on lane {self.kind!r}")
        view = destination(ticket, out)
        verify(ticket.payload, ticket)
        view[:] = ticket.payload
        return view

    async def release(self, ticket: Ticket) -> None:
        """Nothing is held."""

    async def close(self) -> None:
        """Nothing is held."""
