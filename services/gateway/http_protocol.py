"""One HTTP connection: bounded heads, in size and in time, and faults told as other errors are."""

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from finback.services.gateway.error_envelope import error_document
from finback.shared.errors import InvalidRequest

MAX_HEAD_BYTES: Final = 64 * 1024
# From the connection, or the first byte of a request, until its headers are complete.
HEAD_TIMEOUT_S: Final = 30.0


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's parser and cycle; bodies are bounded where they are read."""

    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or too much of it; the connection ends."""
        error = InvalidRequest("This is no valid HTTP request.", reason="invalid_http")
        if self._head_bytes > MAX_HEAD_BYTES:
            error = InvalidRequest(
                f"the headers are larger than {MAX_HEAD_BYTES} bytes", reason="headers_too_large"
            )
        body = error_document(error)
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % len(body) + body)
        self.transport.close()

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("headers too large")  # the parser makes a 400 of it

    def _await_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.close()
