"""A service inside the test's own event loop, on a `LocalBus`: no server, no process."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import anyio

from finback.shared.actor.client import Client
from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.memory_kv import MemoryKV
from finback.shared.actor.registry import Directory, Registry
from finback.shared.actor.service import Service, ServiceContext, new_epoch
from finback.shared.config import StackConfig
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.subjects import Subjects

S = TypeVar("S", bound=Service)


@contextlib.asynccontextmanager
async def serving(
    factory: Callable[[ServiceContext], S],
    *,
    broker: LocalBroker | None = None,
    kv: MemoryKV | None = None,
    config: StackConfig | None = None,
    instance: str = "",
) -> AsyncIterator[S]:
    """Start a service, hand it over, then drain and stop it."""
    config = config or StackConfig(lease_ttl_s=3.0, drain_timeout_s=2.0)
    kv = kv or MemoryKV(ttl_s=config.lease_ttl_s)
    bus = LocalBus(broker)
    subjects = Subjects(config.subject_prefix)
    metrics = Metrics()
    async with anyio.create_task_group() as tasks:
        context = ServiceContext(
            config=config,
            bus=bus,
            client=Client(bus, subjects),
            subjects=subjects,
            instance=instance or f"{getattr(factory, 'name', 'service')}-000001",
            epoch=new_epoch(),
            registry=Registry(kv, ttl_s=config.lease_ttl_s, metrics=metrics),
            directory=Directory(kv, ttl_s=config.lease_ttl_s, metrics=metrics),
            metrics=metrics,
            task_group=tasks,
            logger=get_logger("test"),
        )
        service = factory(context)
        tasks.start_soon(context.registry.renew_forever)
        tasks.start_soon(context.directory.watch_forever)
        await service.begin()
        yield service
        await service.finish()
        tasks.cancel_scope.cancel()
    await bus.close()
