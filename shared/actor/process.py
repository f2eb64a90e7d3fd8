"""One service as one process: settings, logs, traces, bus, registry, signals, exit code.

The first SIGTERM or SIGINT drains, the second ends the process at once. Exit codes: 0 drained,
1 failed (the reason is logged), 2 a setting is wrong (one line on stderr).
"""

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from finback.shared import config as settings
from finback.shared.actor import micro
from finback.shared.actor.client import Client
from finback.shared.actor.kv import JetStreamKV
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.actor.registry import Directory, Registry, bucket_name
from finback.shared.actor.service import Service, ServiceContext, new_epoch
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError, ServingError, Unavailable
from finback.shared.telemetry import logging, tracing
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.subjects import Subjects

ORPHAN_GRACE_S = 30.0
_ORPHAN_CHECK_S = 1.0

ServiceFactory = Callable[[ServiceContext], Service]

_log = logging.get_logger(__name__)


def run(
    service_factory: ServiceFactory,
    *,
    argv: Sequence[str] | None = None,
    options: Sequence[argparse.ArgumentParser] = (),
) -> int:
    """Run a service until it is told to stop; return the exit code.

    `options`: parsers of what the caller has read from `argv` itself, for the help text.
    """
    name = getattr(service_factory, "name", "service")
    # A supervisor names its children, so that it can tell at once which instance has ended.
    instance = os.environ.get("FINBACK_INSTANCE") or f"{name}-{secrets.token_hex(3)}"
    try:
        config = _configure(name, argv, options)
        logging.setup(name, instance, config.log_level)
        tracing.setup(
            name,
            instance,
            trace_dir=config.trace_dir,
            otlp_endpoint=config.otlp_endpoint,
            sample=config.trace_sample,
            max_file_bytes=config.trace_file_bytes,
        )
        anyio.run(_main, service_factory, config, instance, backend_options={"use_uvloop": True})
    except ConfigError as error:
        sys.stderr.write(f"finback {name}: {error}\n")
        return 2
    except BaseExceptionGroup as group:
        return _report(group)
    except ServingError as error:
        _log.error("service failed", error=error.public_message)
        return 1
    finally:
        tracing.shutdown()
    return 0


async def serve(service: Service) -> None:
    """The life of a service whose context is ready; returns when it has stopped."""
    context = service.context
    tasks = context.task_group
    tasks.start_soon(context.registry.renew_forever)
    tasks.start_soon(context.directory.watch_forever)
    context.bus.on_reconnect(context.registry.reregister)
    context.bus.on_reconnect(context.directory.reconnected)
    subscriptions = await micro.answer(service, context.bus, tasks)
    await service.begin()
    await service.drain_requested.wait()
    await service.finish()
    for subscription in subscriptions:
        await subscription.unsubscribe()


def make_context(
    config: StackConfig, bus: NatsBus, instance: str, metrics: Metrics, tasks: TaskGroup
) -> ServiceContext:
    """What a service is given when it runs on a real server."""
    subjects = Subjects(config.subject_prefix)
    kv = JetStreamKV(bus, bucket_name(config.stack_id), ttl_s=config.lease_ttl_s)
    return ServiceContext(
        config=config,
        bus=bus,
        client=Client(bus, subjects),
        subjects=subjects,
        instance=instance,
        epoch=new_epoch(),
        registry=Registry(kv, ttl_s=config.lease_ttl_s, metrics=metrics),
        directory=Directory(kv, ttl_s=config.lease_ttl_s, metrics=metrics),
        metrics=metrics,
        task_group=tasks,
        logger=logging.get_logger(instance),
    )


def bus_settings(config: StackConfig, name: str) -> BusSettings:
    """How this stack's server is reached; an empty URL is a `ConfigError`."""
    if not config.nats_url:
        raise ConfigError("no NATS server: set FINBACK_NATS_URL, or start with `finback up`")
    return BusSettings(
        url=config.nats_url,
        name=name,
        user=config.nats_user,
        password=config.nats_password,
        ca_file=config.nats_ca_file,
    )


def _configure(
    name: str, argv: Sequence[str] | None, options: Sequence[argparse.ArgumentParser]
) -> StackConfig:
    parser = argparse.ArgumentParser(prog=f"finback.services.{name}", parents=list(options))
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="one setting"
    )
    given = parser.parse_args(argv)
    overrides = dict(item.partition("=")[::2] for item in given.set)
    config, _ = settings.load(given.config, None, overrides)
    return config


async def _main(factory: ServiceFactory, config: StackConfig, instance: str) -> None:
    name = instance.rpartition("-")[0]
    metrics = Metrics()
    async with anyio.create_task_group() as tasks:
        service: Service | None = None

        async def on_signals() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                seen = 0
                async for signum in signals:
                    seen += 1
                    _log.info("signal", signal=signum.name)
                    if seen > 1 or service is None:
                        os._exit(128 + signum)
                    if service.state == "starting":  # nothing is open yet
                        service.context.task_group.cancel_scope.cancel()
                    service.request_drain()

        tasks.start_soon(on_signals)
        bus = await connect(bus_settings(config, name), metrics)
        try:
            async with anyio.create_task_group() as inner:

                async def die(reason: str) -> None:
                    raise Unavailable(reason, reason="bus")

                def closed(reason: str) -> None:
                    inner.start_soon(die, reason)

                bus.on_closed(closed)
                service = factory(make_context(config, bus, instance, metrics, inner))
                inner.start_soon(_drain_when_orphaned, service)
                await serve(service)
                inner.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await bus.close()
        tasks.cancel_scope.cancel()


async def _drain_when_orphaned(service: Service) -> None:
    """Serve on for a while after the supervisor's death, then drain: nobody else would stop us."""
    supervisor = os.environ.get("FINBACK_SUPERVISOR_PID")
    while supervisor and os.getppid() == int(supervisor):  # noqa: ASYNC110  # no event tells of it
        await anyio.sleep(_ORPHAN_CHECK_S)
    if supervisor:
        _log.warning("the supervisor is gone", drains_in_s=ORPHAN_GRACE_S)
        await anyio.sleep(ORPHAN_GRACE_S)
        service.request_drain()


def _report(group: BaseExceptionGroup[BaseException]) -> int:
    """Log why the process ends; a wrong setting is one line for the user."""
    leaves = _leaves(group)
    for error in leaves:
        if isinstance(error, ConfigError):
            sys.stderr.write(f"finback: {error}\n")
            return 2
    for error in leaves:
        if isinstance(error, ServingError):
            _log.error("service failed", code=error.code, error=error.public_message)
        else:
            _log.error("service failed", exc_info=error, error=type(error).__name__)
    return 1


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
