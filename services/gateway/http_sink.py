"""An answer over HTTP: one JSON body, or server-sent events."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.types import Send

from finback.services.gateway.error_envelope import Dialect
from finback.services.gateway.sink import Outcome
from finback.shared.errors import Cancelled, InvariantViolated

KEEP_ALIVE: Final = b": waiting\n\n"
DONE: Final = b"data: [DONE]\n\n"
# A client that has not read for so long is taken for gone; it would hold its request for ever.
SEND_TIMEOUT_S: Final = 60.0
# Characters that some clients take for the end of a line (`str.splitlines`), as JSON escapes. In UTF-8
# they stand only inside strings; control characters are escaped by JSON itself.
_LINE_ENDS: Final = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class HttpSink:
    """Writes to one ASGI response. `status` is what was sent, 0 before.

    `names_events`: each record of a stream carries its document's type as its event's name, and no
    `[DONE]` follows the last. Such documents begin with their type.
    """

    def __init__(
        self,
        send: Send,
        request_id: str,
        *,
        dialect: Dialect = "openai",
        names_events: bool = False,
    ) -> None:
        self._send = send
        self._names_events = names_events
        own = b"request-id" if dialect == "anthropic" else b"x-request-id"
        self._id_header = (own, request_id.encode("latin-1"))
        # Further headers, whatever the answer is; filled in on the way to it.
        self.headers: dict[str, str] = {}
        self.status = 0
        self.is_complete = False
        self.outcome: Outcome | None = None

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        more = _encoded(headers or {})
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
        if self._names_events:
            records = [b"event: %b\ndata: %b\n\n" % (_type_of(d), _one_line(d)) for d in documents]
        else:
            records = [b"data: %b\n\n" % _one_line(document) for document in documents]
        await self._body(b"".join(records))

    async def send_error(self, document: bytes) -> None:
        """An error's document, whatever it begins with."""
        event = b"event: error\n" if self._names_events else b""
        await self._body(event + b"data: %b\n\n" % _one_line(document))

    async def keep_alive(self) -> None:
        await self._body(KEEP_ALIVE)

    async def close_stream(self, final: Outcome) -> None:
        self.is_complete = True
        self.outcome = final
        last = DONE if final == "end" and not self._names_events else b""
        await self._send({"type": "http.response.body", "body": last})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        headers += [self._id_header, *_encoded(self.headers)]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _body(self, body: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError as error:
            self.is_complete, self.outcome = True, "cancelled"
            raise Cancelled("the client does not read its answer") from error


def _encoded(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]


def _one_line(document: bytes) -> bytes:
    """A JSON document in which nobody sees the end of a line."""
    for raw, escaped in _LINE_ENDS:
        if raw in document:
            document = document.replace(raw, escaped)
    return document


_TYPE_PREFIX: Final = b'{"type":"'


def _type_of(document: bytes) -> bytes:
    """The type that a document begins with."""
    end = document.find(b'"', len(_TYPE_PREFIX))
    if not document.startswith(_TYPE_PREFIX) or end < 0:
        raise InvariantViolated("a document of a stream with named events must begin with its type")
    return document[len(_TYPE_PREFIX) : end]
