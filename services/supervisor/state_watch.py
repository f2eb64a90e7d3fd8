"""What the services say of themselves, and what is said of those that can say nothing any more."""

import asyncio
from typing import Final

from finback.services.supervisor.slot import Slot
from finback.shared import clock
from finback.shared.actor.bus import Message
from finback.shared.actor.client import Client
from finback.shared.errors import ServingError, WireError
from finback.shared.telemetry.logging import get_logger
from finback.shared.wire import codec
from finback.shared.wire.messages.control import (
    InstanceLost,
    PingReply,
    PingRequest,
    StateChanged,
)

# Events may be lost while the bus reconnects; a ping finds out what they would have said.
PING_EVERY_S: Final = 1.0

_log = get_logger(__name__)


class StateWatch:
    """Follows the state events of the given slots (the list may grow) and publishes losses."""

    def __init__(self, client: Client, slots: list[Slot]) -> None:
        self._client = client
        self._slots = slots
        self._epochs: dict[str, int] = {}

    async def start(self) -> None:
        """Listen; every event published after this returns is seen."""
        prefix = self._client.subjects.prefix
        await self._client.bus.subscribe(f"{prefix}.v1.event.*.state", self._heard)

    def _heard(self, message: Message) -> None:
        try:
            event = codec.decode(message.data, StateChanged)
        except WireError as error:
            _log.warning("odd state event", subject=message.subject, error=error.public_message)
            return
        self._apply(event.instance, event.epoch, event.state)

    def _apply(self, instance: str, epoch: int, state: str) -> None:
        for slot in self._slots:
            if slot.instance == instance:
                self._epochs[instance] = epoch
                slot.report_state(state)

    async def poll_forever(self) -> None:
        """Ask those that should serve by now and have not said so."""
        while True:
            await asyncio.sleep(PING_EVERY_S)
            for slot in self._slots:
                if slot.state == "starting" and slot.child is not None and slot.child.is_running:
                    await self._ask(slot)

    async def _ask(self, slot: Slot) -> None:
        subject = self._client.subjects.instance(slot.spec.roles[0], slot.instance, "ping")
        try:
            reply = await self._client.call(
                subject, PingRequest(), PingReply, timeout_s=PING_EVERY_S
            )
        except ServingError:  # it does not listen yet
            return
        self._apply(reply.instance, reply.epoch, reply.state)

    async def tell_lost(self, slot: Slot, instance: str, reason: str, *, is_crash: bool) -> None:
        """Publish that `instance` has ended, once for every role that it had."""
        epoch = self._epochs.pop(instance, 0) or int(clock.unix_s() * 1000)
        subject = self._client.subjects.event("supervisor", "instance-lost")
        for role in slot.spec.roles:
            event = InstanceLost(
                service=role, instance=instance, epoch=epoch, reason=reason, is_crash=is_crash
            )
            try:
                await self._client.publish(subject, event)
            except ServingError as error:
                _log.warning("cannot tell of a loss", instance=instance, error=str(error))
        await self._flush()

    async def _flush(self) -> None:
        try:
            await self._client.bus.flush()
        except ServingError:
            return
