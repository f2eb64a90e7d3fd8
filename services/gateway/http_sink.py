"""An answer over HTTP: one JSON body, or server-sent events."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Send

from finback.services.gateway.sink import Outcome
from finback.shared.errors import Cancelled

KEEP_ALIVE: Final = b": waiting\n\n"
DONE: Final = b"data: [DONE]\n\n"
# A client that has not read for so long is taken for gone; it would hold its request for ever.
SEND_TIMEOUT_S: Final = 60.0
_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class HttpSink:
    """Writes to one ASGI response. `status` is what was sent, 0 before."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id_header = (b"x-request-id", request_id.encode("latin-1"))
        self.status = 0
        self.is_complete = False
        self.outcome: Outcome | None = None

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        more = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()]
        await self._start(
            status,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                *more,
            ],
        )
        self.is_complete = True
        await self._send({"type": "http.response.body", "body": body})

    async def open_stream(self) -> None:
        await self._start(200, list(_STREAM_HEADERS))

    async def send(self, documents: Sequence[bytes]) -> None:
        await self._body(b"".join([b"data: %b\n\n" % document for document in documents]))

    async def keep_alive(self) -> None:
        await self._body(KEEP_ALIVE)

    async def close_stream(self, final: Outcome) -> None:
        self.is_complete = True
        self.outcome = final
        last = DONE if final == "end" else b""
        await self._send({"type": "http.response.body", "body": last})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers.append(self._id_header)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError as error:
            self.is_complete, self.outcome = True, "cancelled"
            raise Cancelled("the client does not read its answer") from error
