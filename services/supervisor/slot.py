"""One service of the stack: kept running, its state known, its losses told."""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from finback.services.supervisor import log_files, process, restart_policy
from finback.services.supervisor.memory_kills import MemoryKills
from finback.services.supervisor.restart_policy import RestartPolicy
from finback.services.supervisor.run_dir import RunDir, ServiceState
from finback.services.supervisor.topology import ProcessSpec
from finback.shared import clock
from finback.shared.errors import ConfigError
from finback.shared.telemetry.logging import get_logger

# What `shared/actor/process.py` ends with when its configuration cannot work: no use in trying again.
CONFIG_EXIT_CODE: Final = 2

_log = get_logger(__name__)


class Watcher(Protocol):
    """Whom a slot tells what happens to it."""

    def changed(self) -> None:
        """The state file is out of date."""

    async def lost(self, slot: "Slot", instance: str, reason: str, *, is_crash: bool) -> None:
        """The process of `instance` has ended; `is_crash`: not by our or its own wish."""


EnvironmentOf = Callable[[ProcessSpec, str], Mapping[str, str]]


@dataclass(slots=True)
class Slot:
    """Runs `spec`, again and again until told to stop or found failed."""

    spec: ProcessSpec
    run_dir: RunDir
    environment: EnvironmentOf
    watcher: Watcher
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    state: str = "stopped"
    instance: str = ""
    detail: str = ""
    restarts: int = 0
    child: process.Child | None = None
    serving: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    _has_served: bool = False
    _is_stopping: bool = False
    _crashes_s: tuple[float, ...] = ()
    # Why the process was ended from here, and whether that counts against it.
    _hang: tuple[str, bool] | None = None
    _kills: MemoryKills = field(default_factory=MemoryKills)

    def snapshot(self) -> ServiceState:
        """What `status` shows."""
        child = self.child
        return ServiceState(
            state=self.state,
            pid=child.pid if child and child.is_running else 0,
            instance=self.instance,
            start_time=child.start_time if child else 0.0,
            restarts=self.restarts,
            detail=self.detail,
        )

    def report_state(self, state: str) -> None:
        """The registry's word about the running instance."""
        if self.state == "failed" or self._is_stopping or state == self.state:
            return
        self.state = state
        if state == "serving":
            self._has_served = True
            self.serving.set()
        self.watcher.changed()

    async def keep(self) -> None:
        """Start; after each end tell of it and start again, unless that is pointless."""
        while not self._is_stopping:
            self._kills.mark()
            exit_code = await self._run_once()
            if self._is_stopping:
                break
            hang, self._hang = self._hang, None
            reason = hang[0] if hang else restart_policy.describe_exit(exit_code)
            is_crash = hang is None and exit_code != 0
            await self.watcher.lost(self, self.instance, reason, is_crash=is_crash)
            delay_s = self._next_delay(exit_code, reason, is_own_hang=hang is not None and hang[1])
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)
            self.restarts += 1

    async def _run_once(self) -> int:
        self.instance = f"{self.spec.name}-{secrets.token_hex(3)}"
        self.serving.clear()
        self.state, self.detail = "starting", ""
        self.child = await process.start(
            [*process.python_module(self.spec.module), *self.spec.arguments],
            self.environment(self.spec, self.instance),
            self.run_dir.log(self.spec.name),
        )
        self.watcher.changed()
        exit_code = await self.child.wait()
        self.serving.clear()
        return exit_code

    def _next_delay(self, exit_code: int, reason: str, *, is_own_hang: bool) -> float | None:
        """Seconds until the next start; None marks the service failed."""
        hopeless = exit_code == CONFIG_EXIT_CODE and not self._has_served
        out_of_memory = self._kills.happened()
        decision = restart_policy.decide(
            self.policy,
            self._crashes_s,
            clock.monotonic_s(),
            crashed=is_own_hang or restart_policy.is_crash(exit_code, out_of_memory=out_of_memory),
            random_unit=random.random(),
        )
        self._crashes_s = decision.crashes_s
        said = log_files.last_line(self.run_dir.log(self.spec.name))
        if hopeless or decision.delay_s is None:
            self.state, self.detail = "failed", said or reason
            _log.error("service failed", service=self.spec.name, reason=reason, said=said)
            self.failed.set()
        else:
            self.state, self.detail = "restarting", reason
            _log.warning(
                "service ended; starting it again",
                service=self.spec.name,
                instance=self.instance,
                reason=reason,
                delay_s=round(decision.delay_s, 3),
            )
        self.watcher.changed()
        return None if hopeless else decision.delay_s

    async def stop(self, timeout_s: float) -> None:
        """Drain the process and wait; killed after `timeout_s`."""
        self._is_stopping = True
        if self.child is not None and self.child.is_running:
            self.state = "draining"
            self.watcher.changed()
            if not await self.child.stop(timeout_s):
                _log.warning("service did not stop in time; killed", service=self.spec.name)
        self.state = "stopped"
        self.watcher.changed()

    def kill_hung(self, why: str, *, is_own_fault: bool) -> None:
        """End a process that answers nothing; it is started again."""
        if self.child is not None and self.child.is_running:
            self._hang = (why, is_own_fault)
            self.child.kill()

    def kill(self) -> None:
        """Forced stop."""
        self._is_stopping = True
        if self.child is not None:
            self.child.kill()


async def wait_serving(
    slots: list[Slot], timeout_s: float, still_waiting: Callable[[list[str]], None]
) -> None:
    """Until all serve. Raises `ConfigError` with the reason of the first that failed."""
    waits = {asyncio.create_task(_first_word(slot)): slot for slot in slots}
    deadline_s = clock.monotonic_s() + timeout_s
    try:
        while waits:
            left_s = deadline_s - clock.monotonic_s()
            if left_s <= 0:
                names = ", ".join(slot.spec.name for slot in waits.values())
                raise ConfigError(f"not serving after {timeout_s:.0f} s: {names}; see finback logs")
            done, _ = await asyncio.wait(
                waits, timeout=min(left_s, 1.0), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                slot = waits.pop(task)
                if slot.failed.is_set():
                    raise ConfigError(f"{slot.spec.name} did not start: {slot.detail}")
            still_waiting([slot.spec.name for slot in waits.values()])
    finally:
        for task in waits:
            task.cancel()


async def _first_word(slot: Slot) -> None:
    words = [asyncio.create_task(event.wait()) for event in (slot.serving, slot.failed)]
    try:
        await asyncio.wait(words, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for word in words:
            word.cancel()


async def stop_all(steps: list[list[Slot]], timeout_s: float) -> None:
    """Stop group after group; within a group at the same time."""
    for group in steps:
        stops: list[Awaitable[None]] = [slot.stop(timeout_s) for slot in group]
        await asyncio.gather(*stops)
