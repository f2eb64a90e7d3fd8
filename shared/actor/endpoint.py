"""A verb that a service answers: a bounded mailbox, a few workers, deadlines, errors as headers.

The bus callback only enqueues. A full mailbox is answered at once (`Overloaded`), expired work is
dropped when its turn comes, and whatever a handler raises reaches the caller as a code and a public
text, never as a repr.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from finback.shared.actor.bus import Bus, Message, Subscription
from finback.shared.actor.call import Call, EndpointSpec, EndpointStats, Handler
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.envelope import deadline_of, error_headers, int_header
from finback.shared.errors import (
    DeadlineExceeded,
    InvariantViolated,
    Overloaded,
    ServingError,
    Unavailable,
)
from finback.shared.telemetry import tracing
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire import headers as h

__all__ = ["Call", "Endpoint", "EndpointSpec", "EndpointStats", "Handler"]

_LAST_WORDS_S: Final = 1.0  # for the reply of work that is cancelled
_OVERLOAD_RETRY_S: Final = 1.0
_log = get_logger(__name__)


class Endpoint:
    """One mailbox and its workers. Several subjects may feed it."""

    def __init__(
        self, spec: EndpointSpec, bus: Bus, metrics: Metrics, *, is_draining: Callable[[], bool]
    ) -> None:
        self.spec = spec
        self.stats = EndpointStats()
        self.subjects: list[tuple[str, str | None]] = []
        self._bus = bus
        self._metrics = metrics
        self._is_draining = is_draining
        self._subscriptions: list[tuple[Subscription, str | None]] = []
        self._mailbox: asyncio.Queue[tuple[Message, Deadline]] = asyncio.Queue(spec.mailbox)
        self._is_closed = False
        self._tasks: TaskGroup | None = None
        self._scopes: list[anyio.CancelScope] = []  # one a worker
        self._num_open = 0
        self._idle = anyio.Event()

    async def run(self, tasks: TaskGroup) -> None:
        """Start the workers in the service's task group."""
        self._tasks = tasks
        for _ in range(self.spec.workers):
            tasks.start_soon(self._work)

    async def listen(self, subject: str, queue: str | None) -> None:
        """Take requests on one more subject."""
        self.subjects.append((subject, queue))
        subscription = await self._bus.subscribe(subject, self.offer, queue=queue)
        self._subscriptions.append((subscription, queue))

    def offer(self, message: Message) -> None:
        """The bus callback: enqueue, or refuse at once."""
        if self._is_closed:
            self._refuse(message, Unavailable(f"{self.spec.name} has stopped", reason="stopped"))
            return
        if self._is_draining() and self.spec.refuse_when_draining:
            self._refuse(message, Unavailable(f"{self.spec.name} is draining", reason="draining"))
            return
        try:
            self._mailbox.put_nowait((message, deadline_of(message.headers)))
            self._num_open += 1
        except asyncio.QueueFull:
            self._metrics.count("finback.endpoint.overloaded", endpoint=self.spec.name)
            self._refuse(
                message,
                Overloaded(
                    f"{self.spec.name} is overloaded",
                    reason="mailbox_full",
                    retry_after_s=_OVERLOAD_RETRY_S,
                ),
            )

    @property
    def num_open(self) -> int:
        """Requests in the mailbox or being worked on."""
        return self._num_open

    async def wait_idle(self) -> None:
        """Return when nothing is in the mailbox or being worked on."""
        while self._num_open:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def close_queue_groups(self) -> None:
        """Leave the queue groups: others of the service take what comes next."""
        for subscription, queue in self._subscriptions:
            if queue is not None:
                await subscription.drain()

    async def close(self) -> None:
        """Take nothing more; cancelled workers tell their callers `Unavailable`."""
        for subscription, _ in self._subscriptions:
            await subscription.unsubscribe()
        self._is_closed = True
        for scope in self._scopes:
            scope.cancel()

    # -- one request

    async def _work(self) -> None:
        with anyio.CancelScope() as scope:
            self._scopes.append(scope)
            while True:
                try:
                    message, deadline = await self._mailbox.get()
                except anyio.EndOfStream:
                    return
                try:
                    await self._serve(message, deadline)
                finally:
                    self._done()
        await self._refuse_rest()

    def _done(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    async def _refuse_rest(self) -> None:
        """Tell those still in the mailbox that nobody will serve them."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_LAST_WORDS_S):
            while not self._mailbox.empty():
                message, _ = self._mailbox.get_nowait()
                self._done()
                await self._reply_error(message, Unavailable(f"{self.spec.name} stops"))

    async def _serve(self, message: Message, deadline: Deadline) -> None:
        started = time.perf_counter_ns()
        error: ServingError | None = None
        try:
            result = await self._handled(message, deadline)
            await self._reply(message, result)
        except ServingError as raised:
            error = raised
            if isinstance(raised, InvariantViolated):
                self._log_bug(message, raised)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LAST_WORDS_S):
                gone = Unavailable(f"{self.spec.name} stops", reason="stopping")
                await self._reply_error(message, gone)
            raise
        except Exception as raised:  # noqa: BLE001  # a handler's bug must not take others along
            self._log_bug(message, raised)
            error = ServingError("internal error")
        if error is not None:
            await self._reply_error(message, error)
        self._account(time.perf_counter_ns() - started, error)

    def _log_bug(self, message: Message, error: Exception) -> None:
        _log.error(
            "handler failed",
            endpoint=self.spec.name,
            request_id=message.headers.get(h.REQUEST_ID, ""),
            error=type(error).__name__,
            exc_info=error,
        )
        self._metrics.count("finback.endpoint.bugs", endpoint=self.spec.name)

    async def _handled(self, message: Message, deadline: Deadline) -> Any:
        spec, headers = self.spec, message.headers
        if deadline.is_expired:
            self._metrics.count("finback.endpoint.expired", endpoint=spec.name)
            raise DeadlineExceeded(f"{spec.name}: expired before its turn", reason="expired")
        call: Call[Any] = Call(
            message=self._decoded(message),
            request_id=headers.get(h.REQUEST_ID, ""),
            attempt=int_header(headers, h.ATTEMPT, 1),
            headers=headers,
            deadline=deadline,
            wants_reply=message.reply is not None,
            asker=_user_of(message.reply),
        )
        self._check_fences(call)
        parent = tracing.extract(headers) if spec.is_traced else None
        if parent is None and not (spec.is_traced and h.TRACEPARENT in headers):
            return await self._in_time(call)
        attributes = {
            tracing.REQUEST_ID: call.request_id,
            "messaging.system": "nats",
            "messaging.operation.type": "process",
            "finback.attempt": call.attempt,
        }
        with tracing.span(spec.name, attributes, parent=parent or Context(), kind=SpanKind.SERVER):
            return await self._in_time(call)

    async def _in_time(self, call: Call[Any]) -> Any:
        with anyio.move_on_at(_on_loop(call.deadline)) as scope:
            return await self.spec.handler(call)
        if scope.cancelled_caught:
            raise DeadlineExceeded(f"{self.spec.name}: out of time")
        return None

    def _decoded(self, message: Message) -> Any:
        request_type = self.spec.request_type
        return message.data if request_type is bytes else codec.decode(message.data, request_type)

    def _check_fences(self, call: Call[Any]) -> None:
        spec = self.spec
        meant = int_header(call.headers, h.EPOCH, 0)
        if spec.epoch and meant and meant != spec.epoch:
            raise Unavailable(f"{spec.name}: meant for another epoch", reason="epoch")
        if spec.fence is not None and not spec.fence.admit(call.request_id, call.attempt):
            self._metrics.count("finback.endpoint.superseded", endpoint=spec.name)
            raise Unavailable(f"{spec.name}: superseded by a later attempt", reason="superseded")

    def _account(self, elapsed_ns: int, error: ServingError | None) -> None:
        self.stats.num_requests += 1
        self.stats.processing_ns += elapsed_ns
        self._metrics.observe(
            "finback.endpoint.duration", elapsed_ns / 1e9, endpoint=self.spec.name
        )
        if error is not None:
            self.stats.num_errors += 1
            self.stats.last_error = f"{error.http_status}:{error.public_message}"
            self._metrics.count("finback.endpoint.errors", endpoint=self.spec.name, code=error.code)

    # -- replies

    async def _reply(self, message: Message, result: Any) -> None:
        if message.reply is None:
            return
        if result is None or isinstance(result, bytes | bytearray | memoryview):
            await self._bus.publish(message.reply, bytes(result or b""))
            return
        schema = codec.schema_of(type(result))
        await self._bus.publish(message.reply, codec.encode(result), {h.SCHEMA: schema})

    async def _reply_error(self, message: Message, error: ServingError) -> None:
        if message.reply is None:
            return
        try:
            await self._bus.publish(message.reply, b"", error_headers(error))
        except ServingError as failed:
            _log.warning("cannot reply", endpoint=self.spec.name, error=failed.public_message)

    def _refuse(self, message: Message, error: ServingError) -> None:
        if message.reply is not None and self._tasks is not None:
            self._tasks.start_soon(self._reply_error, message, error)


def _user_of(inbox: str | None) -> str:
    """Inboxes lie under `_INBOX.<user>.`."""
    parts = (inbox or "").split(".")
    return parts[1] if len(parts) > 2 and parts[0] == "_INBOX" else ""


def _on_loop(deadline: Deadline) -> float:
    """A deadline of ours as a time of the event loop's clock."""
    return anyio.current_time() + deadline.remaining_s()
