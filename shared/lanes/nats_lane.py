"""Lane `nats`: the putting side serves its bytes piece by piece, the getting side asks for them.

For hosts without common memory, and when the arena is full or its owner is away. It belongs on a
connection of its own (`connect` once more), so that KV never stands in front of tokens.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import anyio

from finback.shared.actor.bus import FRAME_RESERVE_BYTES, Bus, Message, Subscription
from finback.shared.actor.envelope import error_headers, request_headers
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, NotFound, Overloaded, ServingError
from finback.shared.lanes.base import Buffer, CorruptData, checksum, destination, verify
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire import codec
from finback.shared.wire.messages.lane import FetchRequest

KIND: Final = "nats"
CHUNK_BYTES: Final = 512 * 1024
WINDOW: Final = 4  # chunks under way at once, a get
EXPIRY_S: Final = 30.0
MAX_OFFERED_BYTES: Final = 256 * 1024 * 1024
_MAX_QUEUED: Final = 1024  # requests that wait to be served


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
        """`timeout_s`: for one piece. Offers nobody released are dropped after `expiry_s`."""
        self._bus = bus
        self._subject = subject
        self._expiry_s = expiry_s
        self._max_offered_bytes = max_offered_bytes
        self._timeout_s = timeout_s
        self._offers: dict[int, _Offer] = {}
        self._offered_bytes = 0
        self._asked: asyncio.Queue[Message] = asyncio.Queue(_MAX_QUEUED)
        self._subscription: Subscription | None = None
        self._server: asyncio.Task[None] | None = None

    @property
    def num_offered_bytes(self) -> int:
        """Bytes held for tickets that are neither released nor expired."""
        return self._offered_bytes

    async def start(self) -> None:
        """Serve tickets from here on; a side that only reads need not start."""
        if self._subject and self._server is None:
            self._server = asyncio.create_task(self._serve(), name="nats-lane")
            self._subscription = await self._bus.subscribe(self._subject, self._enqueue)

    async def put(self, data: Buffer) -> Ticket:
        """Keep a copy until released or expired. Raises `Overloaded` above the bound."""
        if self._server is None:
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
        step = min(CHUNK_BYTES, self._bus.max_payload - 2 * FRAME_RESERVE_BYTES)
        offsets = iter(range(0, ticket.length, step))
        failures: list[ServingError] = []

        async def fetch_pieces() -> None:
            for offset in offsets:
                if failures:
                    return
                try:
                    await self._fetch(ticket, view[offset : offset + step], offset)
                except ServingError as error:
                    failures.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(min(WINDOW, -(-ticket.length // step))):
                group.start_soon(fetch_pieces)
        if failures:
            reason = "gone" if isinstance(failures[0], NotFound) else "unreachable"
            raise CorruptData(reason, failures[0].public_message)
        verify(view, ticket)
        return view

    async def release(self, ticket: Ticket) -> None:
        """Drop the copy."""
        self._drop(ticket.generation)

    async def close(self) -> None:
        """Stop serving and drop everything; the bus stays open."""
        subscription, self._subscription = self._subscription, None
        server, self._server = self._server, None
        if subscription is not None:
            await subscription.unsubscribe()
        if server is not None:
            server.cancel()
            await asyncio.wait([server])
        self._offers.clear()
        self._offered_bytes = 0

    async def _fetch(self, ticket: Ticket, view: memoryview, offset: int) -> None:
        request = FetchRequest(generation=ticket.generation, offset=offset, length=len(view))
        reply = await self._bus.request(
            ticket.location,
            codec.encode(request),
            request_headers(codec.schema_of(FetchRequest), timeout_s=self._timeout_s),
            timeout_s=self._timeout_s,
        )
        if len(reply.data) != len(view):
            raise NotFound(f"a piece of {len(reply.data)} bytes instead of {len(view)}")
        view[:] = reply.data

    def _enqueue(self, message: Message) -> None:
        # A full queue drops the request: its asker times out and takes it as a miss.
        if not self._asked.full():
            self._asked.put_nowait(message)

    async def _serve(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._expiry_s / 2):
                    message = await self._asked.get()
            except TimeoutError:
                self._drop_expired()
                continue
            if message.reply is not None:
                await self._answer(message, message.reply)

    async def _answer(self, message: Message, reply: str) -> None:
        headers: Mapping[str, str] | None = None
        try:
            body = self._piece(codec.decode(message.data, FetchRequest))
        except ServingError as error:
            body, headers = b"", error_headers(error)
        try:
            await self._bus.publish(reply, body, headers)
        except ServingError:
            return  # the bus is away: the asker times out, which is a miss

    def _piece(self, request: FetchRequest) -> bytes:
        offer = self._offers.get(request.generation)
        if offer is None or offer.expires_s <= monotonic_s():
            raise NotFound("no such offer, or it has expired")
        if not 0 <= request.length <= CHUNK_BYTES or request.offset < 0:
            raise InvalidRequest(f"a piece has at most {CHUNK_BYTES} bytes", param="length")
        return offer.data[request.offset : request.offset + request.length]

    def _drop_expired(self) -> None:
        now_s = monotonic_s()
        for generation in [g for g, offer in self._offers.items() if offer.expires_s <= now_s]:
            self._drop(generation)

    def _drop(self, generation: int) -> None:
        offer = self._offers.pop(generation, None)
        if offer is not None:
            self._offered_bytes -= len(offer.data)
