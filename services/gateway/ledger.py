"""What this gateway holds of tenants' limits, and how routers hear of it.

Ends are told at once, and what is held every other second to all routers, and at once to a new one. An
end is told again with each admission of its tenant that follows soon: a publish may come late.
"""

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

from finback.shared.actor.client import Client
from finback.shared.clock import monotonic_s
from finback.shared.errors import ServingError
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.route import TenantLedger
from finback.shared.wire.subjects import Subjects

RENEW_S: Final = 2.0
RECENT_S: Final = 0.25
MAX_RECENT: Final = 1024
# In one message: a few thousand fit into its size.
_MAX_IN_A_MESSAGE: Final = 4096


@dataclass(frozen=True, slots=True)
class _Ended:
    tenant: str
    num_tokens: int
    at_s: float


class Ledger:
    """Admissions by their ids."""

    def __init__(
        self, *, client: Client, subjects: Subjects, instance: str, metrics: Metrics, log: Any
    ) -> None:
        self._client = client
        self._subject = subjects.event("gateway", "tenant-ledger")
        self._instance = instance
        self._metrics = metrics
        self._log = log
        self._held: dict[str, str] = {}
        self._recent: OrderedDict[str, _Ended] = OrderedDict()
        self._untold: list[tuple[str, int]] = []
        self._is_held_due = False
        self._wake = asyncio.Event()

    def hold(self, admission: str, tenant: str) -> None:
        """A request was let in."""
        self._held[admission] = tenant

    def settle(self, admission: str, tenant: str, num_tokens: int) -> None:
        """It is over, or was given up while it was asked for; telling it does not wait."""
        self._held.pop(admission, None)
        self._recent[admission] = _Ended(tenant, num_tokens, monotonic_s())
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)
        self._untold.append((admission, num_tokens))
        self._wake.set()

    def lately_ended(self, tenant: str) -> tuple[tuple[str, int], ...]:
        """(admission, tokens) of a tenant's requests that a router may not have heard of yet."""
        since_s = monotonic_s() - RECENT_S
        while self._recent:
            admission, oldest = next(iter(self._recent.items()))
            if oldest.at_s >= since_s:
                break
            del self._recent[admission]
        return tuple((i, e.num_tokens) for i, e in self._recent.items() if e.tenant == tenant)

    def tell_all(self) -> None:
        """Another router counts: it is to know soon what is held."""
        self._is_held_due = True
        self._wake.set()

    async def run(self) -> None:
        """Run in the service's task group."""
        next_s = monotonic_s() + RENEW_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_s - monotonic_s())):
                    await self._wake.wait()
            self._wake.clear()
            if self._is_held_due or monotonic_s() >= next_s:
                self._is_held_due = False
                next_s = monotonic_s() + RENEW_S
                await self._tell_held()
            await self.tell_ends()

    async def tell_ends(self) -> None:
        """Those that were not told yet."""
        settled, self._untold = tuple(self._untold), []
        for at in range(0, len(settled), _MAX_IN_A_MESSAGE):
            part = settled[at : at + _MAX_IN_A_MESSAGE]
            await self._publish(TenantLedger(gateway=self._instance, settled=part))

    async def _tell_held(self) -> None:
        held = tuple(self._held.items())
        for at in range(0, len(held), _MAX_IN_A_MESSAGE):
            part = held[at : at + _MAX_IN_A_MESSAGE]
            await self._publish(TenantLedger(gateway=self._instance, held=part))

    async def _publish(self, ledger: TenantLedger) -> None:
        try:
            await self._client.publish(self._subject, ledger)
        except ServingError as error:
            self._metrics.count("finback.gateway.publish_failures")
            self._log.warning("cannot publish", subject=self._subject, error=error.public_message)
