"""Pieces of lane `nats` over a bus as it is: slower, but over whatever the bus can speak (TLS)."""

import asyncio
from collections.abc import Mapping
from typing import Final

import anyio

from finback.shared.actor.bus import Bus, Message, Subscription
from finback.shared.actor.envelope import error_headers, request_headers
from finback.shared.errors import NotFound, ServingError
from finback.shared.lanes.data_connection import WINDOW, Answer, Ask
from finback.shared.wire import codec
from finback.shared.wire.messages.lane import FetchRequest

_MAX_QUEUED: Final = 1024  # requests that wait to be served


class BusPieces:
    """As `DataConnection`, with nats-py's copies on the event loop. The bus stays open."""

    def __init__(self, bus: Bus, subject: str, answer: Answer) -> None:
        self._bus = bus
        self._subject = subject
        self._answer = answer
        self._asked: asyncio.Queue[Message] = asyncio.Queue(_MAX_QUEUED)
        self._subscription: Subscription | None = None
        self._server: asyncio.Task[None] | None = None

    @property
    def max_payload(self) -> int:
        """Largest message in bytes."""
        return self._bus.max_payload

    async def open(self) -> None:
        """Serve from here on."""
        if self._subject and self._server is None:
            self._server = asyncio.create_task(self._serve(), name="nats-lane")
            self._subscription = await self._bus.subscribe(self._subject, self._enqueue)

    async def close(self) -> None:
        """Stop serving."""
        subscription, self._subscription = self._subscription, None
        server, self._server = self._server, None
        if subscription is not None:
            await subscription.unsubscribe()
        if server is not None:
            server.cancel()
            await asyncio.wait([server])

    async def fetch(
        self, subject: str, view: memoryview, step: int, ask: Ask, timeout_s: float
    ) -> None:
        """As `DataConnection.fetch`."""
        offsets = iter(range(0, len(view), step))
        failures: list[ServingError] = []

        async def fetch_pieces() -> None:
            for offset in offsets:
                if failures:
                    return
                piece = view[offset : offset + step]
                try:
                    await self._fetch(subject, piece, ask(offset, len(piece)), timeout_s)
                except ServingError as error:
                    failures.append(error)

        async with anyio.create_task_group() as group:
            for _ in range(min(WINDOW, -(-len(view) // step))):
                group.start_soon(fetch_pieces)
        if failures:
            raise failures[0]

    async def _fetch(self, subject: str, view: memoryview, body: bytes, timeout_s: float) -> None:
        headers = request_headers(codec.schema_of(FetchRequest), timeout_s=timeout_s)
        reply = await self._bus.request(subject, body, headers, timeout_s=timeout_s)
        if len(reply.data) != len(view):
            raise NotFound(f"a piece of {len(reply.data)} bytes instead of {len(view)}")
        view[:] = reply.data

    def _enqueue(self, message: Message) -> None:
        # A full queue drops the request: its asker times out and takes it as a miss.
        if not self._asked.full():
            self._asked.put_nowait(message)

    async def _serve(self) -> None:
        while True:
            message = await self._asked.get()
            if message.reply is not None:
                await self._reply(message, message.reply)

    async def _reply(self, message: Message, reply: str) -> None:
        headers: Mapping[str, str] | None = None
        try:
            body = bytes(self._answer(message.data))
        except ServingError as error:
            body, headers = b"", error_headers(error)
        try:
            await self._bus.publish(reply, body, headers)
        except ServingError:
            return  # the bus is away: the asker times out, which is a miss
