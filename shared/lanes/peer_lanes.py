"""Two workers agree on a lane: the giving side says what it has, the reading side probes and chooses.

giving:  ReserveRequest(cache_instance=lanes.cache_instance, file_address=lanes.file_address)
reading: lane = await lanes.agree(peer, request.cache_instance, request.file_address)
giving:  ticket = await lanes.put(lane, data)                   # lanes `file` and `nats`
reading: lanes.missed(peer, ticket.kind, reason) or lanes.took(peer, ticket.kind)
"""

from finback.shared.clock import monotonic_s
from finback.shared.errors import Overloaded, Unavailable
from finback.shared.lanes.base import Buffer
from finback.shared.lanes.file_lane import FileLane
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.select import LANE_FAULTS, LaneChoice
from finback.shared.lanes.session import ArenaSession
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry.metrics import Metrics


class PeerLanes:
    """One worker's side of that."""

    def __init__(
        self, arena: ArenaSession, nats: NatsLane, file: FileLane | None, metrics: Metrics
    ) -> None:
        self._arena = arena
        self._nats = nats
        self._file = file
        self._metrics = metrics
        self._choice = LaneChoice()

    # -- giving

    @property
    def cache_instance(self) -> str:
        """The cache whose arena this process writes to; empty: none."""
        return self._arena.cache_instance

    @property
    def file_address(self) -> str:
        """How to find this side's files; empty: none."""
        return "" if self._file is None else self._file.address

    async def put(self, lane: str, data: Buffer) -> Ticket:
        """By files if that was agreed on and they can be written, else over NATS."""
        if lane == "file" and self._file is not None:
            try:
                return await self._file.put(data)
            except (Unavailable, Overloaded):
                self._metrics.count("finback.lanes.put_failures", lane="file")
        return await self._nats.put(data)

    # -- reading

    async def agree(self, peer: str, cache_instance: str | None, file_address: str) -> str:
        """The fastest lane that works from `peer` to here. `cache_instance` None: it did not say."""
        usable = []
        own = self._arena.cache_instance
        if own and cache_instance in (None, own):
            usable.append("shm")
        if self._file is not None and file_address and await self._file.can_read(file_address):
            usable.append("file")
        return self._choice.choose(peer, usable, monotonic_s())

    def missed(self, peer: str, lane: str, reason: str) -> None:
        """A ticket could not be had: if that speaks against the lane, it is left alone for a while."""
        if reason in LANE_FAULTS:
            self._choice.failed(peer, lane, monotonic_s())
            self._metrics.count("finback.lanes.failures", lane=lane)

    def took(self, peer: str, lane: str) -> None:
        """A ticket was read and found right."""
        self._choice.worked(peer, lane)
