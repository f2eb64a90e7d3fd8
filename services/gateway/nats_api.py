"""The NATS request API: the same JSON on `<prefix>.v1.api.<endpoint>`.

Without `stream` one reply; with it one JSON chunk a message, `Finback-Seq` from 0, and a last empty
message with `Finback-Final`. A client has no credits here: what it does not take within a bounded
time and buffer ends its stream with `slow_consumer`; one that unsubscribes ends it too.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from finback.services.gateway.endpoints import Endpoint
from finback.services.gateway.error_envelope import Dialect, error_document, status_of
from finback.services.gateway.front import Front, root_span
from finback.services.gateway.nats_presence import Asking, Presence
from finback.services.gateway.sink import Outcome
from finback.shared.actor.bus import Bus, Message, Subscription
from finback.shared.actor.envelope import error_headers
from finback.shared.errors import (
    Cancelled,
    InvariantViolated,
    Overloaded,
    ServingError,
    Unavailable,
)
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import headers as h
from finback.shared.wire.subjects import Subjects

QUEUE: Final = "gateway"
# The connection's own buffer is the bound in bytes; this is how long it may stay full.
SEND_TIMEOUT_S: Final = 5.0
# Their inboxes lie under `_INBOX.<user>.`.
SERVICE_USERS: Final = frozenset(
    {"gateway", "router", "prefill", "decode", "drafter", "cache", "sampler", "supervisor"}
)


def may_reply_to(reply: str | None, prefix: str) -> bool:
    """Whether a client may have its answer sent there.

    We may publish where it may not: it must not have us speak to services, to other services'
    inboxes, or to the server's own APIs.
    """
    if not reply or set(reply) & set(" *>") or reply.startswith(("$", f"{prefix}.")):
        return False
    parts = reply.split(".")
    return all(parts) and not (parts[0] == "_INBOX" and SERVICE_USERS & set(parts[1:2]))


class NatsSink:
    """Publishes one answer to a reply subject."""

    def __init__(
        self,
        bus: Bus,
        to: str,
        request_id: str,
        *,
        dialect: Dialect = "openai",
        asking: Asking | None = None,
    ) -> None:
        """`asking`: how it is found out that the client has left."""
        self._bus = bus
        self._asking = asking
        self._dialect = dialect
        self._to = to
        self._request_id = request_id
        self._seq = 0
        # Further headers of the first message.
        self.headers: dict[str, str] = {}
        self.is_complete = False

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        # What the bus does not take (a body above its limit) is still to be answered by an error.
        await self._publish(body, {h.REQUEST_ID: self._request_id, **self.headers})
        self.is_complete = True

    async def open_stream(self) -> None:
        """The first document opens it."""

    async def send(self, documents: Sequence[bytes]) -> None:
        for document in documents:
            await self._numbered(document, {})

    async def keep_alive(self) -> None:
        """Subscriptions do not time out."""

    async def close_stream(self, final: Outcome) -> None:
        self.is_complete = True
        await self._numbered(b"", {h.FINAL: final, h.REQUEST_ID: self._request_id})

    async def fail(self, error: ServingError) -> None:
        """An error, alone or in the middle of a stream, and the end of it."""
        if self.is_complete:
            return
        is_alone = self._seq == 0
        more = {**error_headers(error), h.REQUEST_ID: self._request_id}
        document = error_document(error, self._dialect, request_id=self._request_id)
        if is_alone:
            self.is_complete = True
            await self._numbered(document, {**more, h.FINAL: "error"})
            return
        await self._numbered(document, more)
        await self.close_stream("cancelled" if isinstance(error, Cancelled) else "error")

    async def _numbered(self, body: bytes, headers: dict[str, str]) -> None:
        if self._seq == 0:
            headers.update(self.headers)
        headers[h.SEQ] = str(self._seq)
        self._seq += 1
        asking = None if self.is_complete else self._asking
        await self._publish(body, headers, asking.reply() if asking is not None else None)

    async def _publish(
        self, body: bytes, headers: dict[str, str], reply: str | None = None
    ) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._bus.publish(self._to, body, headers, reply=reply)
        except (TimeoutError, Unavailable) as error:
            raise Overloaded(
                "the reply is not taken fast enough", reason="slow_consumer"
            ) from error


class NatsApi:
    """Answers requests from the bus, beside the HTTP server and by the same handlers."""

    def __init__(
        self,
        *,
        bus: Bus,
        subjects: Subjects,
        front: Front,
        spawn: Callable[..., None],
        metrics: Metrics,
        log: Any,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._front = front
        self._spawn = spawn
        self._metrics = metrics
        self._log = log
        self._subscriptions: list[Subscription] = []
        self._presence = Presence(bus)

    async def start(self) -> None:
        """Subscribe; ready when this returns."""
        await self._presence.start()
        for endpoint in self._front.endpoints.values():

            def take(message: Message, endpoint: Endpoint = endpoint) -> None:
                if may_reply_to(message.reply, self._subjects.prefix):
                    self._spawn(self._handle, endpoint, message)
                elif message.reply:
                    self._metrics.count("finback.gateway.bad_replies")

            subject = self._subjects.api(endpoint.name)
            self._subscriptions.append(await self._bus.subscribe(subject, take, queue=QUEUE))

    async def drain(self) -> None:
        """Take no new requests; other gateways do."""
        for subscription in self._subscriptions:
            await subscription.drain()
        self._subscriptions.clear()

    async def _handle(self, endpoint: Endpoint, message: Message) -> None:
        request_id = self._front.request_ids.choose(message.headers.get(h.REQUEST_ID))
        dialect = endpoint.dialect
        task, is_gone = asyncio.current_task(), False

        def gone() -> None:
            nonlocal is_gone
            is_gone = True
            if task is not None:
                task.cancel()

        asking = self._presence.watch(gone)
        sink = NatsSink(self._bus, message.reply or "", request_id, dialect=dialect, asking=asking)
        status = "200"
        try:
            await self._answer(endpoint, message, sink, request_id)
        except ServingError as error:
            status = str(status_of(error, dialect))
            await self._fail(sink, error)
        except asyncio.CancelledError:
            if not is_gone or task is None or task.uncancel() > 0:
                raise
            status = "499"
            self._metrics.count("finback.gateway.disconnects")
        except Exception:  # noqa: BLE001 -- the edge: a bug in one request must not end others
            status = "500"
            self._log.exception("request failed", request_id=request_id)
            await self._fail(sink, InvariantViolated("the server failed; see its log"))
        finally:
            self._presence.forget(asking)
        self._metrics.count(
            "finback.gateway.requests", endpoint=f"nats {endpoint.name}", status=status
        )

    async def _answer(
        self, endpoint: Endpoint, message: Message, sink: NatsSink, request_id: str
    ) -> None:
        headers = message.headers
        with root_span(endpoint, request_id, headers, self._front.exchange.model.name):
            await self._front.answer(
                endpoint,
                message.data,
                sink,
                request_id=request_id,
                authorization=headers.get(h.AUTHORIZATION),
                idempotency_key=headers.get(h.IDEMPOTENCY_KEY),
                headers=sink.headers,
            )

    async def _fail(self, sink: NatsSink, error: ServingError) -> None:
        try:
            await sink.fail(error)
        except ServingError as failed:
            self._log.warning("cannot reply", error=failed.public_message)
