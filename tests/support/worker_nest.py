"""Services in the test's own event loop over a real NATS server, engines without a model."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio

from finback.shared import config as settings
from finback.shared.actor import process
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.config import StackConfig
from finback.shared.engine.worker_host import LoadEngine, WorkerHost, host_class
from finback.shared.telemetry.metrics import Metrics
from support.fake_engine import FakeEngine


class Nest:
    """Starts services as tasks; `crash` ends one without a word, as kill -9 would."""

    def __init__(self, url: str, prefix: str, folder: Path, **overrides: Any) -> None:
        values = {
            "nats_url": url,
            "subject_prefix": prefix,
            "stack_id": prefix,
            "run_dir": str(folder / "run"),
            "shm_dir": str(folder / "shm"),
            "model_name": "m",
            **overrides,
        }
        self.config: StackConfig = settings.load(None, {}, values)[0]
        self.engines: dict[str, FakeEngine] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def worker(self, *roles: str, **engine: Any) -> WorkerHost:
        """Start a worker with these roles, over a `FakeEngine`."""
        made: list[FakeEngine] = []

        def load(config: StackConfig, on_step: Callable[[Any], None]) -> Any:
            made.append(FakeEngine(on_step, **engine))
            return made[0]

        service = await self.worker_with(load, *roles)
        self.engines[service.instance] = made[0]
        return service

    async def worker_with(self, load: LoadEngine, *roles: str) -> WorkerHost:
        """Start a worker with these roles, over whatever engine `load` makes."""
        service = await self.start(host_class(roles[-1], roles, load))
        if not isinstance(service, WorkerHost):
            raise TypeError("not a worker")
        return service

    async def start(self, factory: Callable[[ServiceContext], Service]) -> Service:
        """Start a service; returns when it serves."""
        ready: asyncio.Future[Service] = asyncio.get_running_loop().create_future()
        name = getattr(factory, "name", "service")
        instance = f"{name}-{secrets.token_hex(3)}"
        task = asyncio.create_task(self._run(factory, instance, ready))
        self._tasks[instance] = task
        task.add_done_callback(lambda _: ready.cancel())
        service = await ready
        async with asyncio.timeout(30):
            while service.state != "serving":
                await asyncio.sleep(0.005)
                if task.done():
                    await task
        return service

    async def _run(
        self,
        factory: Callable[[ServiceContext], Service],
        instance: str,
        ready: "asyncio.Future[Service]",
    ) -> None:
        bus = await connect(BusSettings(url=self.config.nats_url, name=instance))
        try:
            async with anyio.create_task_group() as tasks:
                context = process.make_context(self.config, bus, instance, Metrics(), tasks)
                service = factory(context)
                ready.set_result(service)
                await process.serve(service)
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await bus.close()

    async def crash(self, service: Service) -> None:
        """End a service at once: no drain, no goodbye."""
        task = self._tasks.pop(service.instance)
        engine = self.engines.pop(service.instance, None)
        if engine is not None:
            await engine.stop()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def task_of(self, service: Service) -> "asyncio.Task[None]":
        """The task that ends when the service has stopped (or failed)."""
        return self._tasks[service.instance]

    async def close(self) -> None:
        """End everything."""
        for engine in self.engines.values():
            await engine.stop()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def nest(url: str, prefix: str, folder: Path, **overrides: Any) -> AsyncIterator[Nest]:
    """A `Nest` that is closed afterwards."""
    made = Nest(url, prefix, folder, **overrides)
    try:
        yield made
    finally:
        await made.close()
