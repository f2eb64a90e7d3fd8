"""Several lanes behind one `get`, and which of them to use towards a peer."""

import time
from collections.abc import Iterable, Sequence
from typing import Final

from finback.shared.lanes.base import CorruptData, Lane
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics

# The fastest first. `inline` is chosen by size, never by this order.
ORDER: Final = ("shm", "file", "nats")
QUIET_S: Final = 1.0
MAX_QUIET_S: Final = 60.0
MAX_REMEMBERED: Final = 1024
# Reasons of a miss that speak against the lane; others speak against one block.
LANE_FAULTS: Final = frozenset({"unreachable", "gone"})


class LaneSet:
    """The lanes that this process can read from, by kind."""

    def __init__(self, lanes: Iterable[Lane], metrics: Metrics | None = None) -> None:
        """With `metrics`, transfers are counted and timed."""
        self._lanes = {lane.kind: lane for lane in lanes}
        self._metrics = metrics

    @property
    def kinds(self) -> tuple[str, ...]:
        """What `get` understands."""
        return tuple(self._lanes)

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """As `Lane.get`; a kind that is not here is a miss."""
        lane = self._lanes.get(ticket.kind)
        if lane is None:
            raise CorruptData("unreachable", f"no lane of kind {ticket.kind!r} here")
        started = time.perf_counter()
        try:
            data = await lane.get(ticket, out)
        except CorruptData as error:
            self._failed(ticket, error.reason)
            raise
        self._worked(ticket, time.perf_counter() - started)
        return data

    def _worked(self, ticket: Ticket, seconds: float) -> None:
        """In the metrics, and as sums in the span of whoever reads: a span each would cost too much."""
        lane = ticket.kind
        if self._metrics is not None:
            self._metrics.count("finback.lanes.read_bytes", ticket.length, lane=lane)
            self._metrics.observe("finback.lanes.read_duration", seconds, lane=lane)
        name = f"finback.lane.{lane}"
        tracing.add_up({f"{name}.bytes": ticket.length, f"{name}.ms": seconds * 1e3})

    def _failed(self, ticket: Ticket, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.count("finback.lanes.read_failures", lane=ticket.kind, reason=reason)
        attributes = {"finback.lane": ticket.kind, "finback.reason": reason}
        tracing.add_event("lane read failed", {**attributes, "finback.bytes": ticket.length})

    async def release(self, ticket: Ticket) -> None:
        """As `Lane.release`, for the side that put it."""
        lane = self._lanes.get(ticket.kind)
        if lane is not None:
            await lane.release(ticket)

    async def close(self) -> None:
        """Close all lanes."""
        for lane in self._lanes.values():
            await lane.close()


class LaneChoice:
    """Which lane to use towards each peer: the fastest that its probe allows and that works.

    A lane that failed at use is left alone for a second, then twice as long each time; the last lane
    of `ORDER` is used whatever happened, for there is none after it. Pure: the caller brings the time.
    """

    def __init__(self) -> None:
        self._quiet: dict[tuple[str, str], tuple[float, float]] = {}

    def choose(self, peer: str, usable: Sequence[str], now_s: float) -> str:
        """The lane to use; `usable` are those whose probe succeeded."""
        for lane in ORDER[:-1]:
            until_s, _ = self._quiet.get((peer, lane), (0.0, 0.0))
            if lane in usable and now_s >= until_s:
                return lane
        return ORDER[-1]

    def failed(self, peer: str, lane: str, now_s: float) -> None:
        """The lane did not deliver. Failures of one quiet time count once."""
        until_s, quiet_s = self._quiet.get((peer, lane), (0.0, 0.0))
        if len(self._quiet) >= MAX_REMEMBERED and (peer, lane) not in self._quiet:
            del self._quiet[next(iter(self._quiet))]
        if now_s >= until_s:
            quiet_s = min(MAX_QUIET_S, quiet_s * 2 or QUIET_S)
            self._quiet[peer, lane] = (now_s + quiet_s, quiet_s)

    def worked(self, peer: str, lane: str) -> None:
        """The lane delivered."""
        self._quiet.pop((peer, lane), None)
