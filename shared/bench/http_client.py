"""Streams text completions over HTTP/1.1, as cheaply as asyncio allows: the client shares the machine.

One connection a request, kept for the next. Times are taken when bytes arrive, before they are read.
"""

import asyncio
import json
import ssl
import time
from typing import Any, Final, cast
from urllib.parse import SplitResult, urlsplit

import httptools

from finback.shared.bench.load import Job, Sampling
from finback.shared.bench.track import RequestFailed, RequestRefused, Track
from finback.shared.errors import ConfigError

CONNECT_TIMEOUT_S: Final = 10.0
_TOO_MANY: Final = (429, 503)


def completion_body(job: Job, sampling: Sampling, model: str, *, has_ids: bool) -> bytes:
    """The JSON of one request, for `/v1/completions` or the NATS request API.

    `has_ids`: ask for the ids of all tokens, so that they are counted as they come.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.num_tokens,
        "ignore_eos": True,
        "temperature": sampling.temperature,
        "seed": job.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if has_ids:
        body["return_token_ids"] = True
    if sampling.num_logprobs is not None:
        body["logprobs"] = sampling.num_logprobs
    return json.dumps(body, separators=(",", ":")).encode()


def check_url(url: str) -> SplitResult:
    """The parts of an address. Raises `ConfigError` if it is none that HTTP reaches."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url must look like http://host:port, not {url!r}")
    return parts


class HttpClient:
    """A `Client` of an OpenAI-compatible service."""

    def __init__(self, *, url: str, model: str, key: str = "", has_ids: bool = True) -> None:
        """`url`: without `/v1`. Raises `ConfigError` if it is none."""
        self._has_ids = has_ids
        parts = check_url(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._model = model
        lines = [
            f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        self._head = "\r\n".join(lines)
        self._idle: list[_Connection] = []

    async def ask(self, job: Job, sampling: Sampling, track: Track) -> None:
        """See `Client`."""
        body = completion_body(job, sampling, self._model, has_ids=self._has_ids)
        head = f"{self._head}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = await self._connection()
        try:
            await connection.exchange(head.encode() + body, track)
        except BaseException:
            connection.abort()
            raise
        if connection.is_open:
            self._idle.append(connection)

    async def reset(self) -> None:
        """There is no request for it; the prompts' marks see to it."""

    def stats(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connection(self) -> "_Connection":
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await loop.create_connection(
                    _Connection, self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            where = f"{self._host}:{self._port}"
            raise RequestFailed(f"cannot connect to {where}: {error or 'timed out'}") from error
        return made


class _Connection(asyncio.Protocol):
    """One request at a time; httptools calls the `on_` methods."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._track: Track | None = None
        self._over: asyncio.Future[None] | None = None
        self._rest = b""
        self._at_s = 0.0
        self._status = 0
        self._retry_after_s = 0.0

    async def exchange(self, request: bytes, track: Track) -> None:
        """Send, and wait for the whole answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._track, self._rest = track, b""
        self._status, self._retry_after_s = 0, 0.0
        self._over = asyncio.get_running_loop().create_future()
        if self._transport is not None:
            self._transport.write(request)
        await self._over
        self._check(track)

    def _check(self, track: Track) -> None:
        if self._status == 200:
            if not track.is_ended:
                raise RequestFailed("the stream ended before the answer did")
            return
        message = f"HTTP {self._status}: {_message_of(self._rest)}"
        if self._status in _TOO_MANY:
            raise RequestRefused(message, self._retry_after_s)
        raise RequestFailed(message)

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._at_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, RequestFailed) as error:
            cause = error.__context__ if isinstance(error.__context__, RequestFailed) else error
            self._end(RequestFailed(str(cause)))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._end(RequestFailed(f"the connection was lost: {error or 'closed'}"))

    def _end(self, error: RequestFailed | None) -> None:
        if self._over is not None and not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            try:
                self._retry_after_s = float(value)
            except ValueError:
                self._retry_after_s = 0.0  # a date: our own pause serves as well

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._rest += body
        if self._status != 200 or self._track is None:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._track.take(event[6:], self._at_s)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._end(None)


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
