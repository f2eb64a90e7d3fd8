"""Looks after generations whose peers may be gone: gateways, prefill instances, and time itself."""

import asyncio
from typing import Final

from finback.services.decode.generations import Generations
from finback.services.decode.table import ChoiceState, Request
from finback.shared.clock import monotonic_s
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import ServingError
from finback.shared.wire.messages.control import InstanceLost, PingReply, PingRequest

_SWEEP_S: Final = 0.1
# How long a reservation waits in silence before its prefill instance is asked whether it lives.
_SILENCE_S: Final = 5.0
_PING_TIMEOUT_S: Final = 2.0
_KEEP_ENDED_S: Final = 60.0


class PeerWatch:
    """Ends what nobody waits for, and what nobody will complete."""

    def __init__(self, host: WorkerHost, generations: Generations) -> None:
        self._host = host
        self._generations = generations
        self._pinging: set[str] = set()

    async def start(self) -> None:
        """Hear of losses: from the supervisor at once, from the registry when a lease is gone."""
        subject = self._host.subjects.event("supervisor", "instance-lost")
        await self._host.listen(subject, InstanceLost, self._on_lost)
        self._host.watch_instances("gateway", self._gateway_gone)
        self._host.watch_instances("prefill", self._prefill_gone)
        self._host.spawn(self._run)

    def _on_lost(self, lost: InstanceLost) -> None:
        if lost.instance != self._host.instance:
            self._gateway_gone(lost.instance)
            self._prefill_gone(lost.instance)

    def _gateway_gone(self, instance: str) -> None:
        for request in self._generations.table.by_gateway(instance):
            self._host.log.warning(
                "gateway is gone, cancelling", request_id=request.request_id, gateway=instance
            )
            self._host.spawn(
                self._generations.cancel, request.request_id, request.spec.attempt, None
            )

    def _prefill_gone(self, instance: str) -> None:
        for request in self._generations.table.awaiting(instance):
            self._host.metrics.count("finback.decode.reservations_expired")
            why = f"prefill instance {instance} is gone"
            self._generations.end_request_with_error(request, "unavailable", why, instance)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = monotonic_s()
            for request in self._generations.table:
                self._sweep(request, now)

    def _sweep(self, request: Request, now: float) -> None:
        if request.is_ended:
            if now - max(c.ended_s for c in request.choices.values()) >= _KEEP_ENDED_S:
                self._generations.forget(request)
        elif now >= request.deadline_s:
            for choice in request.choices.values():
                if choice.state is not ChoiceState.ENDED:
                    text = "the request ran out of time"
                    self._generations.end_with_error(choice, "deadline_exceeded", text)
        elif not request.is_activated and now - request.heard_s >= _SILENCE_S:
            self._ask(request.prefill_instance)

    def _ask(self, instance: str) -> None:
        if instance not in self._pinging:
            self._pinging.add(instance)
            self._host.spawn(self._ping, instance)

    async def _ping(self, instance: str) -> None:
        """A long silence may be a long queue, or a death that no event told of."""
        try:
            await self._host.client.call(
                self._host.subjects.instance("prefill", instance, "ping"),
                PingRequest(),
                PingReply,
                timeout_s=_PING_TIMEOUT_S,
            )
        except ServingError:
            self._prefill_gone(instance)
        else:
            now = monotonic_s()
            for request in self._generations.table.awaiting(instance):
                request.heard_s = now
        finally:
            self._pinging.discard(instance)
