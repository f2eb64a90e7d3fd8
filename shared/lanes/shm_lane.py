"""Lane `shm`: bytes through the arena of this host, a lease a ticket."""

from typing import Final

import anyio
from anyio import to_thread

from finback.shared.errors import Unavailable
from finback.shared.lanes.base import Buffer, CorruptData
from finback.shared.lanes.session import ArenaSession
from finback.shared.lanes.shm import KIND
from finback.shared.lanes.ticket import Ticket


class ShmLane:
    """Lane `shm`: a lease a ticket, made and read through an `ArenaSession`."""

    kind: Final = KIND

    def __init__(self, session: ArenaSession) -> None:
        self.session = session
        self._leases: dict[tuple[str, int, int], str] = {}

    async def put(self, data: Buffer) -> Ticket:
        """Reserve, copy, commit. Raises `Unavailable` when the arena is full or not there."""
        length = len(memoryview(data).cast("B"))
        lease = await self.session.reserve("", 1, max(length, 1))
        if not lease.slots:
            raise Unavailable("the arena is full")
        try:
            slot = lease.slots[0]
            ticket = await to_thread.run_sync(self.session.writer.write, slot, data)
            await self.session.commit_tickets(lease, [slot], [ticket])
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.session.release(lease.lease_id)
            raise
        self._leases[_key(ticket)] = lease.lease_id
        return ticket

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """Copy, then verify checksum and generation on the copy."""
        if not self.session.is_connected:
            raise CorruptData("unreachable", "no arena on this host")
        return await self.session.reader.read(ticket, out)

    async def release(self, ticket: Ticket) -> None:
        """End the ticket's lease."""
        lease_id = self._leases.pop(_key(ticket), None)
        if lease_id is not None:
            await self.session.release(lease_id)

    async def close(self) -> None:
        """Release everything this lane put."""
        leases = tuple(self._leases.values())
        self._leases.clear()
        await self.session.release(*leases)


def _key(ticket: Ticket) -> tuple[str, int, int]:
    return ticket.location, ticket.offset, ticket.generation
