"""Lane `nats`: the putting side serves its bytes piece by piece, the getting side asks for them.

For hosts without common memory, and when the arena is full or its owner is away. It belongs on a
connection of its own, so that KV never stands in front of tokens: a `DataConnection`, or another bus
where the server wants TLS. What travels is the same on both.
"""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Final, Protocol

from anyio import to_thread

from finback.shared.actor.bus import FRAME_RESERVE_BYTES, Bus
from finback.shared.actor.nats_bus import NatsBus
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, NotFound, Overloaded, ServingError
from finback.shared.lanes.base import (
    THREAD_BYTES,
    Buffer,
    CorruptData,
    checksum,
    destination,
    verify,
)
from finback.shared.lanes.bus_pieces import BusPieces
from finback.shared.lanes.data_connection import Ask, DataConnection
from finback.shared.lanes.nats_socket import is_plain
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire import codec
from finback.shared.wire.messages.lane import FetchRequest

KIND: Final = "nats"
CHUNK_BYTES: Final = 512 * 1024
EXPIRY_S: Final = 30.0
MAX_OFFERED_BYTES: Final = 256 * 1024 * 1024


class Pieces(Protocol):
    """How pieces travel: over a connection of their own, or over a bus."""

    @property
    def max_payload(self) -> int: ...

    async def open(self) -> None: ...

    async def fetch(
        self, subject: str, view: memoryview, step: int, ask: Ask, timeout_s: float
    ) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Offer:
    data: bytes
    expires_s: float


class NatsLane:
    """Both ends. `subject`: where this side serves its tickets ("" for a side that only reads)."""

    kind: Final = KIND

    def __init__(
        self,
        bus: Bus,
        subject: str = "",
        *,
        expiry_s: float = EXPIRY_S,
        max_offered_bytes: int = MAX_OFFERED_BYTES,
        timeout_s: float = 5.0,
    ) -> None:
        """`timeout_s`: without a piece. Offers nobody released are dropped after `expiry_s`.

        `bus` only tells how to reach the server, if that can be done over plain TCP; else it is used
        as it is, and left open.
        """
        self._subject = subject
        self._expiry_s = expiry_s
        self._max_offered_bytes = max_offered_bytes
        self._timeout_s = timeout_s
        self._offers: dict[int, _Offer] = {}
        self._offered_bytes = 0
        self._janitor: asyncio.Task[None] | None = None
        self._pieces: Pieces
        if isinstance(bus, NatsBus) and is_plain(bus.settings):
            self._pieces = DataConnection(bus.settings, subject, self._piece)
        else:
            self._pieces = BusPieces(bus, subject, self._piece)

    @property
    def num_offered_bytes(self) -> int:
        """Bytes held for tickets that are neither released nor expired."""
        return self._offered_bytes

    async def start(self) -> None:
        """Serve tickets from here on; a side that only reads need not start. Raises `Unavailable` when its own connection cannot be had."""
        if self._janitor is None:
            await self._pieces.open()
            self._janitor = asyncio.create_task(self._drop_in_time(), name="nats-lane")

    async def put(self, data: Buffer) -> Ticket:
        """Keep a copy until released or expired. Raises `Overloaded` above the bound."""
        if self._janitor is None or not self._subject:
            raise ValueError("a lane that only reads cannot put")
        payload = bytes(data)
        self._drop_expired()
        if self._offered_bytes + len(payload) > self._max_offered_bytes:
            raise Overloaded("too many bytes wait to be fetched", retry_after_s=1.0)
        generation = secrets.randbits(62)
        self._offers[generation] = _Offer(payload, monotonic_s() + self._expiry_s)
        self._offered_bytes += len(payload)
        return Ticket(
            kind=KIND,
            location=self._subject,
            length=len(payload),
            checksum=checksum(payload),
            generation=generation,
        )

    async def get(self, ticket: Ticket, out: memoryview | None = None) -> memoryview:
        """Fetch all pieces, a few at a time, and verify the whole."""
        if ticket.kind != KIND or not ticket.location:
            raise CorruptData("ticket", f"kind {ticket.kind!r} on lane {KIND!r}")
        view = destination(ticket, out)
        step = min(CHUNK_BYTES, self._pieces.max_payload - 2 * FRAME_RESERVE_BYTES)

        def ask(offset: int, length: int) -> bytes:
            request = FetchRequest(generation=ticket.generation, offset=offset, length=length)
            return codec.encode(request)

        try:
            if ticket.length:
                await self._pieces.fetch(ticket.location, view, step, ask, self._timeout_s)
        except ServingError as error:
            reason = "gone" if isinstance(error, NotFound) else "unreachable"
            raise CorruptData(reason, error.public_message) from error
        if ticket.length < THREAD_BYTES:
            verify(view, ticket)
        else:
            await to_thread.run_sync(verify, view, ticket)
        return view

    async def release(self, ticket: Ticket) -> None:
        """Drop the copy."""
        self._drop(ticket.generation)

    async def close(self) -> None:
        """Stop serving and drop everything; a bus stays open."""
        janitor, self._janitor = self._janitor, None
        if janitor is not None:
            janitor.cancel()
            await asyncio.wait([janitor])
        await self._pieces.close()
        self._offers.clear()
        self._offered_bytes = 0

    def _piece(self, body: bytes | memoryview) -> memoryview:
        """The bytes that a request asks for; maybe on another thread. Raises `ServingError`."""
        request = codec.decode(body, FetchRequest)
        offer = self._offers.get(request.generation)
        if offer is None or offer.expires_s <= monotonic_s():
            raise NotFound("no such offer, or it has expired")
        if not 0 <= request.length <= CHUNK_BYTES or request.offset < 0:
            raise InvalidRequest(f"a piece has at most {CHUNK_BYTES} bytes", param="length")
        return memoryview(offer.data)[request.offset : request.offset + request.length]

    async def _drop_in_time(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_s / 2)
            self._drop_expired()

    def _drop_expired(self) -> None:
        now_s = monotonic_s()
        for generation in [g for g, offer in self._offers.items() if offer.expires_s <= now_s]:
            self._drop(generation)

    def _drop(self, generation: int) -> None:
        offer = self._offers.pop(generation, None)
        if offer is not None:
            self._offered_bytes -= len(offer.data)
