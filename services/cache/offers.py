"""Tickets for what the store holds: of shared memory, or of bytes served over NATS."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from finback.services.cache.arena import Arena
from finback.services.cache.slots import SlotKey
from finback.shared.actor.service import Service
from finback.shared.errors import Overloaded, ServingError
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.ticket import Ticket

VERB = "kept"


class Offers:
    """Makes tickets; those over NATS are withdrawn when their lease ends."""

    def __init__(
        self, service: Service, arena: Arena, on_corrupt: Callable[[SlotKey, int, str], None]
    ) -> None:
        self._arena = arena
        self._on_corrupt = on_corrupt
        subject = service.subjects.instance("cache", service.instance, VERB)
        self._lane = NatsLane(service.context.bus, subject)
        self._reader = ArenaReader(arena.folder)
        self._offered: defaultdict[str, list[Ticket]] = defaultdict(list)

    async def stop(self) -> None:
        """Withdraw everything."""
        await self._lane.close()
        self._reader.close()

    async def tickets(
        self, keys: Sequence[SlotKey], lane: str, lease_id: str
    ) -> tuple[tuple[Ticket, ...], str]:
        """Tickets of kept slots that the lease holds; fewer where one cannot be had, and why."""
        tickets = tuple(self._arena.ticket(key) for key in keys)
        if lane != self._lane.kind:
            return tickets, ""
        try:
            await self._lane.start()  # on its first use, as it has a connection of its own
        except ServingError:
            return (), "busy"
        offered = self._offered[lease_id]
        start = len(offered)
        for key, ticket in zip(keys, tickets, strict=True):
            try:
                offered.append(await self._lane.put(await self._reader.read(ticket)))
            except CorruptData as error:
                self._on_corrupt(key, ticket.generation, error.reason)
                return tuple(offered[start:]), "corrupt"
            except Overloaded:
                return tuple(offered[start:]), "busy"
        return tuple(offered[start:]), ""

    async def withdraw(self, lease_ids: Iterable[str]) -> None:
        """Leases have ended: what was offered under them is offered no more."""
        for lease_id in lease_ids:
            for ticket in self._offered.pop(lease_id, ()):
                await self._lane.release(ticket)

    async def prune(self) -> None:
        """Withdraw what was offered under leases that have run out."""
        await self.withdraw([i for i in self._offered if not self._arena.book.is_leased(i)])
