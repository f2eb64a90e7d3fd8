"""The stack's life: private bus, services, readiness, restarts, ordered end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from finback.services.supervisor import (
    child_config,
    cleanup,
    log_files,
    nats_config,
    nats_server,
    ports,
    probe,
    topology,
)
from finback.services.supervisor import slot as slots_
from finback.services.supervisor.hang_watch import HangWatch
from finback.services.supervisor.nats_server import NatsServer
from finback.services.supervisor.run_dir import (
    RunDir,
    ServiceState,
    StackState,
    start_time,
    write_private,
)
from finback.services.supervisor.slot import Slot
from finback.services.supervisor.state_watch import StateWatch
from finback.services.supervisor.topology import ProcessSpec
from finback.shared import clock
from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.config import StackConfig
from finback.shared.cores import num_cores
from finback.shared.errors import ConfigError
from finback.shared.telemetry.logging import get_logger
from finback.shared.wire.subjects import Subjects

START_TIMEOUT_S: Final = 300.0
# Beyond the drain time that services keep themselves, before they are killed.
STOP_MARGIN_S: Final = 3.0
ROTATE_EVERY_S: Final = 10.0
TELL_EVERY_S: Final = 5.0

_STOP_GROUPS: Final = (("gateway",), ("router",), ("prefill", "decode"))

_log = get_logger(__name__)


class Supervisor:
    """Runs one stack from start to end; `report` gets one line of progress at a time."""

    def __init__(
        self, config: StackConfig, *, nats_port: int, report: Callable[[str], None]
    ) -> None:
        self._config = config
        self._nats_port = nats_port
        self._report = report
        self._run_dir = RunDir(Path(config.run_dir))
        self._nats: NatsServer | None = None
        self._bus: NatsBus | None = None
        self._slots: list[Slot] = []
        self._states: StateWatch | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._is_ready = False
        self._started_unix_s = clock.unix_s()
        self._failure = ""
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    # -- what others see

    @property
    def state(self) -> StackState:
        """What the state file says."""
        config, nats = self._config, self._nats
        services = self._by_role()
        return StackState(
            stack_id=config.stack_id,
            supervisor_pid=os.getpid(),
            supervisor_start_time=start_time(os.getpid()),
            http=probe.url_of(config),
            nats=nats.url_with(nats_config.CLIENT) if nats else config.nats_url,
            model=config.model_name,
            shm_dir=config.shm_dir,
            ready=self._is_ready,
            nats_pid=nats.child.pid if nats else 0,
            nats_start_time=nats.child.start_time if nats else 0.0,
            trace_dir=config.trace_dir,
            started_unix_s=self._started_unix_s,
            services=services,
        )

    def _by_role(self) -> dict[str, ServiceState]:
        """The first process of each role by the role's name, further ones by their own."""
        found: dict[str, ServiceState] = {}
        for slot in self._slots:
            names = [role for role in slot.spec.roles if role not in found] or [slot.spec.name]
            found |= dict.fromkeys(names, slot.snapshot())
        order = [*topology.ROLES, *found]
        return {name: found[name] for name in dict.fromkeys(order) if name in found}

    def changed(self) -> None:
        """Write the state file (a `Watcher` method)."""
        self._run_dir.write_state(self.state)

    async def lost(self, slot: Slot, instance: str, reason: str, *, is_crash: bool) -> None:
        """Tell everybody at once that an instance is gone (a `Watcher` method)."""
        if self._is_ready:
            self._report(f"{slot.spec.name} ended ({reason})")
        if self._states is not None:
            await self._states.tell_lost(slot, instance, reason, is_crash=is_crash)

    # -- life

    async def run(self, on_ready: Callable[[StackState], None]) -> int:
        """Start, call `on_ready`, serve until a signal, stop. Raises `ConfigError` if it cannot start.

        Whatever way it ends, no process, no arena and no state file is left.
        """
        lock = self._run_dir.lock()
        try:
            with self._signals():
                cleanup.after_dead_stack(self._run_dir)
                cleanup.prune_traces(Path(self._config.trace_dir))
                serving = asyncio.create_task(self._start(), name="start")
                if not await self._finished(serving):
                    self._check_failure()
                    return 130
                self._is_ready = True
                self.changed()
                on_ready(self.state)
                await self._stop.wait()
                self._check_failure()
                return 0
        finally:
            await asyncio.shield(self._end())
            lock.release()

    def _check_failure(self) -> None:
        """A task of our own that failed has asked for the stop, not a signal."""
        if self._failure:
            raise ConfigError(self._failure)

    async def _finished(self, start: "asyncio.Task[None]") -> bool:
        """Await the start; False if a signal came first."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not start.done():
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await start
            return False
        start.result()
        return True

    async def _start(self) -> None:
        await self._start_bus()
        config = self._config
        cores = num_cores()
        layout = topology.choose_layout(config.roles_layout, cores)
        http_port = ports.choose(config.http_host, config.http_port, "HTTP", "--http-port")
        self._config = config = child_config.effective(
            config,
            http_port=http_port,
            roles_layout=layout,
            cluster_key_file=self._run_dir.keep_cluster_key(config),
        )
        config_file = self._run_dir.root / "config.toml"
        write_private(config_file, child_config.to_toml(config))
        specs = topology.plan(
            layout, cores, config.num_threads, num_decodes=config.decode_processes
        )
        environment = self._environment_of(config_file)
        self._slots += [Slot(spec, self._run_dir, environment, self) for spec in specs]
        self.changed()
        self._report(f"starting {len(specs)} services, prefill and decode {_layout_words(layout)}")
        for slot in self._slots:
            self._spawn(slot.keep(), f"keep-{slot.spec.name}")
        self._spawn(self._rotate_logs(), "rotate-logs")
        await slots_.wait_serving(self._slots, START_TIMEOUT_S, self._tell_waiting())
        self._report("services are up; waiting for the gateway")
        await probe.wait_http_ready(probe.url_of(config), START_TIMEOUT_S)

    async def _start_bus(self) -> None:
        config = self._config
        url, user, password = config.nats_url, config.nats_user, config.nats_password
        if not url:
            self._report("starting a private NATS server")
            self._nats = await nats_server.start(
                self._run_dir,
                port=self._nats_port,
                prefix=config.subject_prefix,
                name=f"finback-{config.stack_id}",
            )
            url, user = self._nats.url, nats_config.SUPERVISOR
            password = self._nats.passwords[user]
            self._spawn(self._nats.keep(self._stop, self.changed), "keep-nats")
        self._bus = await connect(
            BusSettings(
                url=url,
                name="supervisor",
                user=user,
                password=password,
                ca_file=config.nats_ca_file,
                connect_timeout_s=10.0,
            )
        )
        client = Client(self._bus, Subjects(config.subject_prefix))
        self._states = StateWatch(client, self._slots)
        await self._states.start()
        self._spawn(self._states.poll_forever(), "poll-states")
        watch = HangWatch(client, self._slots, timeout_s=config.hang_timeout_s)
        self._spawn(watch.run(), "watch-hangs")

    def _environment_of(self, config_file: Path) -> Callable[[ProcessSpec, str], dict[str, str]]:
        config, nats = self._config, self._nats

        def environment(spec: ProcessSpec, instance: str) -> dict[str, str]:
            return child_config.environment(
                spec,
                config_file=config_file,
                instance=instance,
                nats_url=nats.url if nats else config.nats_url,
                user=spec.user if nats else config.nats_user,
                password=nats.passwords[spec.user] if nats else config.nats_password,
            )

        return environment

    # -- the end

    async def _end(self) -> None:
        """Stop everything in order; at the second signal at once."""
        self._stop.set()
        forced = asyncio.create_task(self._kill_when_forced())
        timeout_s = self._config.drain_timeout_s + STOP_MARGIN_S if self._is_ready else 5.0
        try:
            await slots_.stop_all(self._stop_steps(), timeout_s)
        finally:
            forced.cancel()
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._close_bus()
        state = self.state
        cleanup.remove_arena(state)
        self._run_dir.state_file.unlink(missing_ok=True)

    def _stop_steps(self) -> list[list[Slot]]:
        steps = [
            [slot for slot in self._slots if slot.spec.user in group] for group in _STOP_GROUPS
        ]
        rest = [slot for slot in self._slots if not any(slot in step for step in steps)]
        return [*steps, rest]

    async def _kill_when_forced(self) -> None:
        await self._force.wait()
        for slot in self._slots:
            slot.kill()

    async def _close_bus(self) -> None:
        if self._bus is not None:
            await self._bus.close()
        if self._nats is not None:
            await self._nats.stop()

    # -- helpers

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal stops, the second forces."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._signalled)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _signalled(self) -> None:
        if self._stop.is_set():
            self._force.set()
        else:
            self._report("stopping (once more to stop at once)")
        self._stop.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("supervisor task failed; stopping", task=task.get_name(), error=repr(error))
            self._failure = str(error) or repr(error)
            self._stop.set()

    def _tell_waiting(self) -> Callable[[list[str]], None]:
        """Reports the services still waited for, once for every change and every few seconds."""
        last: tuple[list[str], float] = ([], 0.0)

        def tell(names: list[str]) -> None:
            nonlocal last
            now_s = clock.monotonic_s()
            if names and (names != last[0] or now_s - last[1] > TELL_EVERY_S):
                last = (names, now_s)
                self._report(f"waiting for {', '.join(names)}")

        return tell

    async def _rotate_logs(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for path in self._run_dir.logs.glob("*.log"):
                await asyncio.to_thread(log_files.rotate, path)


def _layout_words(layout: topology.Layout) -> str:
    return "in one process" if layout == "cohost" else "separate"
