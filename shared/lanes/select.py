"""Several lanes behind one `get`: the ticket says which one it is of."""

from collections.abc import Iterable

from finback.shared.lanes.base import CorruptData, Lane
from finback.shared.lanes.ticket import Ticket


class LaneSet:
    """The lanes that this process can read from, by kind."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self._lanes = {lane.kind: lane for lane in lanes}

    @property
    def kinds(self) -> tuple[str, ...]:
        """What `get` understands."""
        return tuple(self._lanes)

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """As `Lane.get`; a kind that is not here is a miss."""
        lane = self._lanes.get(ticket.kind)
        if lane is None:
            raise CorruptData("unreachable", f"no lane of kind {ticket.kind!r} here")
        return await lane.get(ticket, out)

    async def release(self, ticket: Ticket) -> None:
        """As `Lane.release`, for the side that put it."""
        lane = self._lanes.get(ticket.kind)
        if lane is not None:
            await lane.release(ticket)

    async def close(self) -> None:
        """Close all lanes."""
        for lane in self._lanes.values():
            await lane.close()
