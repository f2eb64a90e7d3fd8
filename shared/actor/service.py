"""A service: what it is given, its endpoints, and its life: starting, serving, draining, stopped."""

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import anyio
from anyio.abc import TaskGroup

from finback.shared.actor.bus import Bus, Message, Subscription
from finback.shared.actor.client import Client
from finback.shared.actor.endpoint import Call, Endpoint, EndpointSpec, Handler
from finback.shared.actor.fence import Fence
from finback.shared.actor.registry import Directory, Registry
from finback.shared.clock import unix_s
from finback.shared.config import StackConfig
from finback.shared.errors import ServingError, WireError
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.control import (
    DrainCommand,
    InstanceRecord,
    PingReply,
    PingRequest,
    StateChanged,
)
from finback.shared.wire.messages.prefill import Ack
from finback.shared.wire.subjects import Subjects

M = TypeVar("M")
State = Literal["starting", "serving", "draining", "stopped"]
Scope = Literal["any", "instance", "both"]


@dataclass(slots=True, kw_only=True)
class ServiceContext:
    """Everything a service is made with; built by `process.run`, or by a test."""

    config: StackConfig
    bus: Bus
    client: Client
    subjects: Subjects
    instance: str
    epoch: int
    registry: Registry
    directory: Directory
    metrics: Metrics
    task_group: TaskGroup
    logger: Any


class Service:
    """Subclass per service; override `start`, and `drain`, `stop`, `record`, `progress` as needed."""

    name: ClassVar[str]

    def __init__(self, context: ServiceContext) -> None:
        self.context = context
        self.config = context.config
        self.client = context.client
        self.subjects = context.subjects
        self.instance = context.instance
        self.epoch = context.epoch
        self.log = context.logger
        self.metrics = context.metrics
        self.state: State = "starting"
        self.endpoints: list[Endpoint] = []
        self.started_unix_s = unix_s()
        self.drain_requested = anyio.Event()
        self.drain_timeout_s = context.config.drain_timeout_s
        self._subscriptions: list[Subscription] = []

    # -- to override

    async def start(self) -> None:
        """Load and add endpoints. A failure ends the process."""

    async def drain(self) -> None:
        """Finish open work that no endpoint's mailbox knows of; new work is no longer offered."""

    async def stop(self) -> None:
        """Release what `start` took."""

    def record(self) -> InstanceRecord:
        """This instance's registry entry; called after `start`, and whenever it may have changed."""
        return self.base_record()

    def progress(self) -> int:
        """A number that rises with every completed unit of work."""
        return sum(endpoint.stats.num_requests for endpoint in self.endpoints)

    # -- to use

    def base_record(self, **more: Any) -> InstanceRecord:
        """The facts that every service has; `more` are further fields of the record."""
        values: dict[str, Any] = {
            "service": self.name,
            "instance": self.instance,
            "epoch": self.epoch,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "state": self.state,
            "started_unix_s": self.started_unix_s,
        }
        return InstanceRecord(**{**values, **more})

    @property
    def is_draining(self) -> bool:
        return self.state in ("draining", "stopped")

    async def add_endpoint(
        self,
        verb: str,
        request_type: type,
        handler: Handler,
        *,
        scope: Scope,
        mailbox: int = 256,
        workers: int = 8,
        role: str | None = None,
        refuse_when_draining: bool = False,
        is_traced: bool = True,
        fence: Fence | None = None,
    ) -> Endpoint:
        """Answer `verb`; ready when this returns.

        `scope`: any instance (queue group), this one, or both. `role`: under another name than the
        service's, for processes that host several. `fence`: drop attempts older than one seen.
        One worker serves strictly in order.
        """
        name = role or self.name
        spec = EndpointSpec(
            name=f"{name} {verb}",
            request_type=request_type,
            handler=handler,
            mailbox=mailbox,
            workers=workers,
            refuse_when_draining=refuse_when_draining,
            is_traced=is_traced,
            fence=fence,
            epoch=self.epoch,
        )
        context = self.context
        endpoint = Endpoint(
            spec, context.bus, context.metrics, is_draining=lambda: self.is_draining
        )
        await endpoint.run(context.task_group)
        self.endpoints.append(endpoint)
        if scope in ("any", "both"):
            await endpoint.listen(self.subjects.service(name, verb), name)
        if scope in ("instance", "both"):
            await endpoint.listen(self.subjects.instance(name, self.instance, verb), None)
        return endpoint

    async def listen(
        self,
        subject: str,
        message_type: type[M],
        callback: Callable[[M], None],
        *,
        queue: str | None = None,
    ) -> Subscription:
        """Take publishes (events, token streams) on the event loop; `callback` must not block."""

        def deliver(message: Message) -> None:
            try:
                decoded = codec.decode(message.data, message_type)
            except WireError as error:
                self.metrics.count("finback.listen.undecodable")
                self.log.warning("dropped", subject=subject, error=error.public_message)
                return
            callback(decoded)

        subscription = await self.context.bus.subscribe(subject, deliver, queue=queue)
        self._subscriptions.append(subscription)
        return subscription

    def spawn(self, coro_fn: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> None:
        """Run in the service's task group; a failure takes the process down (exit 1)."""
        self.context.task_group.start_soon(coro_fn, *args)

    async def refresh_record(self) -> None:
        """Write the registry entry anew after `record` has changed."""
        await self._register()

    # -- life, driven by `process.serve`

    async def begin(self) -> None:
        """starting -> serving."""
        await self._say("starting")
        await self.context.registry.register(self.base_record())
        await self.start()
        for name in self.role_names():
            await self._add_builtins(name)
        self.state = "serving"
        await self._register()
        await self._say("serving")
        self.log.info("serving", pid=os.getpid(), url=self.context.bus.url)

    async def finish(self) -> None:
        """serving -> draining -> stopped, all within `drain_timeout_s`."""
        self.state = "draining"
        self.log.info("draining", timeout_s=self.drain_timeout_s)
        with anyio.move_on_after(self.drain_timeout_s) as scope:
            await self.context.registry.set_state("draining")
            await self._say("draining")
            for endpoint in self.endpoints:
                await endpoint.close_queue_groups()
            await self.drain()
            for endpoint in self.endpoints:
                await endpoint.wait_idle()
        if scope.cancelled_caught:
            self.log.warning("drain timed out", open=sum(e.num_open for e in self.endpoints))
        self.state = "stopped"
        with anyio.move_on_after(2):
            await self.context.registry.unregister()
        await self._close()
        with anyio.move_on_after(1):
            await self._say("stopped")

    def request_drain(self, timeout_s: float | None = None) -> None:
        """Begin to drain; `process.serve` does the rest."""
        if timeout_s is not None:
            self.drain_timeout_s = min(timeout_s, self.drain_timeout_s)
        self.drain_requested.set()

    def role_names(self) -> tuple[str, ...]:
        """The names under which this process is in the registry: its roles, or its own name."""
        return self.record().roles or (self.name,)

    async def _register(self) -> None:
        for name in self.role_names():
            record = dataclasses.replace(self.record(), service=name, state=self.state)
            await self.context.registry.register(record)

    async def _add_builtins(self, name: str) -> None:
        builtin: dict[str, Any] = {"scope": "instance", "role": name, "is_traced": False}
        await self.add_endpoint("ping", PingRequest, self._ping, workers=2, **builtin)
        await self.add_endpoint("drain", DrainCommand, self._drain, workers=1, **builtin)
        await self.add_endpoint("metrics", bytes, self._metrics, workers=1, **builtin)

    async def _ping(self, call: Call[PingRequest]) -> PingReply:
        return PingReply(
            instance=self.instance, epoch=self.epoch, state=self.state, progress=self.progress()
        )

    async def _drain(self, call: Call[DrainCommand]) -> Ack:
        self.request_drain(call.message.timeout_s)
        return Ack()

    async def _metrics(self, call: Call[bytes]) -> bytes:
        return self.metrics.render()

    async def _close(self) -> None:
        """Close in reverse order; what fails is named and does not stop the rest."""
        try:
            await self.stop()
        except ServingError as error:
            self.log.warning("stop failed", error=error.public_message)
        for endpoint in reversed(self.endpoints):
            await endpoint.close()
        for subscription in reversed(self._subscriptions):
            await subscription.unsubscribe()

    async def _say(self, state: State) -> None:
        self.state = state
        event = StateChanged(
            service=self.name, instance=self.instance, epoch=self.epoch, state=state
        )
        try:
            await self.client.publish(self.subjects.event(self.name, "state"), event)
        except ServingError as error:
            self.log.warning("cannot tell state", state=state, error=error.public_message)


def new_epoch() -> int:
    """Unix milliseconds: later starts have larger epochs."""
    return time.time_ns() // 1_000_000
