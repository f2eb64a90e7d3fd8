"""Replaces services that run and answer nothing: asks them, and ends those that stay silent.

A silence is a service's own only if others answer meanwhile, the bus does, and we were awake to
hear it. A process that is ended here is started again by its slot.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from finback.services.supervisor.slot import Slot
from finback.shared.actor.client import Client
from finback.shared.clock import monotonic_s
from finback.shared.errors import ServingError
from finback.shared.telemetry.logging import get_logger
from finback.shared.wire.messages.control import PingReply, PingRequest

ASK_EVERY_S: Final = 1.0
# Of the time that a service has: who was heard of within it answers.
_LATELY: Final = 0.5
_FLUSH_S: Final = 1.0
_WATCHED: Final = ("serving", "draining")

_log = get_logger(__name__)


@dataclass(slots=True)
class HangBook:
    """When each instance was heard of. Pure; times in seconds of one clock."""

    timeout_s: float
    heard_s: dict[str, float] = field(default_factory=dict)

    def watch(self, instances: Iterable[str], now_s: float) -> None:
        """These are to be heard of; an instance that is new counts as heard."""
        self.heard_s = {name: self.heard_s.get(name, now_s) for name in instances}

    def heard(self, instance: str, now_s: float) -> None:
        """It answered."""
        if instance in self.heard_s:
            self.heard_s[instance] = now_s

    def forgive(self, now_s: float) -> None:
        """The bus was away, or we stood still: nobody could have been heard."""
        self.heard_s = dict.fromkeys(self.heard_s, now_s)

    def hung(self, now_s: float) -> list[str]:
        """Who has been silent for too long while somebody else was not."""
        silent = [name for name, at_s in self.heard_s.items() if now_s - at_s >= self.timeout_s]
        latest_s = max(self.heard_s.values(), default=now_s)
        others_answer = now_s - latest_s < max(self.timeout_s * _LATELY, 2 * ASK_EVERY_S)
        return silent if others_answer else []


class HangWatch:
    """Asks all services of a stack in turn, for ever; `timeout_s` 0 asks nobody."""

    def __init__(self, client: Client, slots: list[Slot], *, timeout_s: float) -> None:
        self._client = client
        self._slots = slots
        self._timeout_s = timeout_s
        self._book = HangBook(timeout_s)
        # Each turn asks anew, so that a late answer counts when it comes: `timeout_s` bounds them.
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Run beside the slots."""
        if not self._timeout_s:
            return
        try:
            while True:
                before_s = monotonic_s()
                await asyncio.sleep(ASK_EVERY_S)
                if monotonic_s() - before_s > 2 * ASK_EVERY_S:
                    self._book.forgive(monotonic_s())
                await self._turn()
        finally:
            for task in self._asking:
                task.cancel()

    async def _turn(self) -> None:
        watched = {
            slot.instance: slot
            for slot in self._slots
            if slot.state in _WATCHED and slot.child is not None and slot.child.is_running
        }
        if not await self._is_bus_well():
            self._book.forgive(monotonic_s())
        self._book.watch(watched, monotonic_s())
        for instance, slot in watched.items():
            task = asyncio.create_task(self._ask(slot, instance))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        for instance in self._book.hung(monotonic_s()):
            self._end(watched[instance])

    async def _ask(self, slot: Slot, instance: str) -> None:
        subject = self._client.subjects.instance(slot.spec.roles[0], instance, "ping")
        try:
            await self._client.call(subject, PingRequest(), PingReply, timeout_s=self._timeout_s)
        except ServingError:  # silence, or one that has just gone: its slot knows that
            return
        self._book.heard(instance, monotonic_s())

    async def _is_bus_well(self) -> bool:
        try:
            async with asyncio.timeout(_FLUSH_S):
                await self._client.bus.flush()
        except (TimeoutError, ServingError):
            return False
        return self._client.bus.is_connected

    def _end(self, slot: Slot) -> None:
        pid = slot.child.pid if slot.child is not None else 0
        is_stopped = _state_of(pid) == psutil.STATUS_STOPPED
        why = f"no answer for {self._timeout_s:g} s" + (", stopped by a signal" * is_stopped)
        _log.warning("service hangs; replacing it", service=slot.spec.name, pid=pid, why=why)
        # Whoever stopped it from outside, it is not the service's own fault.
        slot.kill_hung(why, is_own_fault=not is_stopped)


def _state_of(pid: int) -> Any:
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return ""
