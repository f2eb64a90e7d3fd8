"""The bus over a NATS server; the only module that imports nats.

It reconnects for ever and bounds every wait. Requests share one wildcard inbox. What nats-py gets
wrong is put right here: a flush is no barrier for earlier subscriptions (two are), and a message
whose headers and body together exceed the server's limit would end the connection for good.
"""

import asyncio
import itertools
import re
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import anyio
import nats
import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from finback.shared.actor.bus import Message, MessageCallback, check_message
from finback.shared.actor.envelope import error_of
from finback.shared.actor.reply_inbox import ReplyInbox
from finback.shared.errors import ConfigError, DeadlineExceeded, Unavailable, WireError
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics

_STATUS: Final = "Status"
_NO_RESPONDERS: Final = "503"
_PENDING_MESSAGES: Final = 65_536
_PENDING_BYTES: Final = 64 * 2**20
_FLUSH_TIMEOUT_S: Final = 10
_NO_HEADERS: Final[Mapping[str, str]] = {}

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BusSettings:
    """How to reach the server. `name` shows in the server's monitoring and in inbox subjects.

    `connect_timeout_s`: give up the first connection after that long (None: never).
    """

    url: str
    name: str = "finback"
    user: str = ""
    password: str = ""
    ca_file: str = ""
    connect_timeout_s: float | None = None
    reconnect_wait_s: float = 0.25
    ping_interval_s: int = 10


class NatsBus:
    """See `Bus`. Made by `connect`."""

    def __init__(self, settings: BusSettings, metrics: Metrics | None) -> None:
        self._settings = settings
        self._metrics = metrics
        self._client = NatsClient()
        # Under the user's name: the server can then keep one user out of another's inboxes.
        owner = re.sub(r"[^A-Za-z0-9_-]", "_", settings.user or settings.name)
        self._inbox = f"_INBOX.{owner}.{settings.name}.{secrets.token_hex(6)}"
        self._tokens = itertools.count(1)
        self._replies = ReplyInbox(f"{self._inbox}.r")
        self._connected = asyncio.Event()
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._on_closed: list[Callable[[str], None]] = []
        self._is_closing = False
        self._refused: ConfigError | None = None
        self._connecting: anyio.CancelScope | None = None
        self._last_error = ""
        self._tasks: set[asyncio.Future[None]] = set()

    # -- state

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def is_closed(self) -> bool:
        return self._client.is_closed

    @property
    def url(self) -> str:
        return self._settings.url

    @property
    def settings(self) -> BusSettings:
        """How this bus reaches its server."""
        return self._settings

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_reconnect.append(callback)

    def on_closed(self, callback: Callable[[str], None]) -> None:
        self._on_closed.append(callback)

    def new_inbox(self) -> str:
        return f"{self._inbox}.i{next(self._tokens)}"

    # -- sending

    async def publish(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        reply: str | None = None,
    ) -> None:
        check_message(subject, body, headers, self.max_payload)
        await self._send(subject, body, headers, reply or "")

    async def request(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Message:
        check_message(subject, body, headers, self.max_payload)
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_connected()
                reply = await self._asked(subject, body, headers)
        except TimeoutError:
            if not self.is_connected:
                raise Unavailable(f"no bus for {subject} within {timeout_s:g} s") from None
            raise DeadlineExceeded(f"no answer from {subject} within {timeout_s:g} s") from None
        if reply.headers.get(_STATUS) == _NO_RESPONDERS:
            raise Unavailable(f"nobody answers on {subject}", reason="no_responders")
        error = error_of(reply.headers) if reply.headers else None
        if error is not None:
            raise error
        return reply

    async def _asked(self, subject: str, body: bytes, headers: Mapping[str, str] | None) -> Message:
        inbox, answer = self._replies.open()
        try:
            await self._send(subject, body, headers, inbox)
            return await answer
        finally:
            self._replies.close(inbox)

    async def flush(self) -> None:
        try:
            await self._client.flush(timeout=_FLUSH_TIMEOUT_S)
        except (nats.errors.Error, TimeoutError) as error:
            raise Unavailable(f"bus does not answer: {error}", reason="bus") from error

    async def _send(
        self, subject: str, body: bytes, headers: Mapping[str, str] | None, reply: str
    ) -> None:
        try:
            await self._client.publish(subject, body, reply, dict(headers) if headers else None)
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise WireError(f"cannot publish on {subject!r}: {error}") from error
        except nats.errors.Error as error:
            raise Unavailable(f"bus cannot send to {subject}: {error}", reason="bus") from error

    async def _wait_connected(self) -> None:
        if self.is_closed:
            raise Unavailable("the bus connection is closed", reason="bus")
        if not self.is_connected:
            await self._connected.wait()

    # -- receiving

    async def subscribe(
        self, subject: str, callback: MessageCallback, *, queue: str | None = None
    ) -> "_Subscription":
        async def deliver(msg: Msg) -> None:
            callback(Message(msg.subject, msg.data, msg.headers or _NO_HEADERS, msg.reply or None))

        try:
            subscription = await self._client.subscribe(
                subject,
                queue=queue or "",
                cb=deliver,
                pending_msgs_limit=_PENDING_MESSAGES,
                pending_bytes_limit=_PENDING_BYTES,
            )
        except nats.errors.Error as error:
            raise Unavailable(f"cannot subscribe to {subject}: {error}", reason="bus") from error
        # A PING may overtake a SUB that still waits to be written; by the second it is out.
        await self.flush()
        await self.flush()
        return _Subscription(self, subscription)

    async def withdraw(self, subscription: NatsSubscription) -> None:
        """Take a subscription from the server; when this returns all messages for it have come."""
        await self._client._send_unsubscribe(subscription._id)  # no public way leaves it open here
        await self.flush()
        await self.flush()

    # -- life of the connection

    async def open(self) -> None:
        """Connect and set up the shared inbox. Raises `ConfigError` if the server refuses us."""
        s = self._settings
        options: dict[str, Any] = {}
        if s.ca_file:
            options["tls"] = ssl.create_default_context(cafile=s.ca_file)
        if s.user:
            options |= {"user": s.user, "password": s.password}
        with anyio.move_on_after(s.connect_timeout_s) as self._connecting:
            await self._client.connect(
                s.url,
                name=s.name,
                inbox_prefix=self._inbox,
                max_reconnect_attempts=-1,
                reconnect_time_wait=s.reconnect_wait_s,  # type: ignore[arg-type]  # a float works
                ping_interval=s.ping_interval_s,
                error_cb=self._errored,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
                **options,
            )
        if self._refused is not None:
            await self.close()
            # It was cancelled in the middle of closing, and does not close twice.
            if self._client._transport is not None:
                self._client._transport.close()  # type: ignore[no-untyped-call]  # nats-py's
            raise self._refused
        if self._connecting.cancelled_caught:
            raise ConfigError(f"no NATS server answers at {s.url}; is it running?")
        self._connecting = None
        self._connected.set()
        self._gauge(True)
        await self.subscribe(self._replies.pattern, self._replies.answered)

    async def close(self) -> None:
        """Close; no callback is called."""
        self._is_closing = True
        for task in tuple(self._tasks):
            task.cancel()
        await self._client.close()
        self._replies.fail_all("the bus connection is closed")

    async def _errored(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if self._connecting is not None and "authorization" in text.lower():
            user = self._settings.user or "(none)"
            self._refused = ConfigError(
                f"NATS server {self._settings.url} refuses user {user}: check nats_user/password"
            )
            self._connecting.cancel()
            return
        self._count("finback.bus.errors", kind=type(error).__name__)
        if text != self._last_error:  # a server that is away would fill the log
            self._last_error = text
            _log.warning("bus error", error=text, url=self._settings.url)

    async def _disconnected(self) -> None:
        self._connected.clear()
        self._gauge(False)
        if not self._is_closing:
            self._count("finback.bus.disconnects")
            _log.warning("bus disconnected", url=self._settings.url)
        self._replies.fail_all("the bus connection was lost")

    async def _reconnected(self) -> None:
        self._last_error = ""
        self._connected.set()
        self._gauge(True)
        self._count("finback.bus.reconnects")
        _log.warning("bus reconnected", url=self._settings.url)
        for callback in self._on_reconnect:
            task: asyncio.Future[None] = asyncio.ensure_future(callback())
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: Any) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("after reconnect", error=repr(task.exception()))
            self._count("finback.bus.errors", kind="reconnect_callback")

    async def _closed(self) -> None:
        self._connected.set()  # wakes waiters, which then see that it is closed
        self._replies.fail_all("the bus connection is closed")
        if self._is_closing:
            return
        reason = (
            f"bus connection to {self._settings.url} closed for good: {self._client.last_error}"
        )
        _log.error("bus closed", reason=reason)
        for callback in self._on_closed:
            callback(reason)

    def _count(self, name: str, **labels: str) -> None:
        if self._metrics is not None:
            self._metrics.count(name, **labels)

    def _gauge(self, is_connected: bool) -> None:
        if self._metrics is not None:
            self._metrics.gauge("finback.bus.connected", float(is_connected))


class _Subscription:
    """Wraps nats-py's, and forgives a connection that is already gone."""

    def __init__(self, bus: NatsBus, inner: NatsSubscription) -> None:
        self._bus = bus
        self._inner = inner

    async def drain(self) -> None:
        try:
            # As with SUB: the client's own drain sends its PING past an UNSUB that waits to be written,
            # and loses what the server sends in between. A second UNSUB does no harm.
            await self._bus.withdraw(self._inner)
            await self._inner.drain()  # type: ignore[no-untyped-call]  # nats-py lacks types
        except (nats.errors.Error, TimeoutError, Unavailable):
            return

    async def unsubscribe(self) -> None:
        try:
            await self._inner.unsubscribe()
        except nats.errors.Error:
            return


async def connect(settings: BusSettings, metrics: Metrics | None = None) -> NatsBus:
    """Connect to the server, waiting for it if it is not there yet."""
    bus = NatsBus(settings, metrics)
    await bus.open()
    return bus
