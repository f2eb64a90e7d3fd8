"""Tenants whose minute is used up: turned away before anything is computed for them. Pure.

What the router said holds until the time it named: others can only use more meanwhile. It is forgotten
when the limits change, or the router that counts.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from finback.services.gateway.grant import TenantLimits
from finback.shared.wire.messages.route import AdmitReply, RateState

MAX_TENANTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closed:
    limits: TenantLimits
    reply: AdmitReply
    told_ms: int


class ClosedDoors:
    """The last refusal of each tenant that no request of any size would escape."""

    def __init__(self) -> None:
        self._closed: OrderedDict[str, _Closed] = OrderedDict()

    def note(self, tenant: str, limits: TenantLimits, reply: AdmitReply, now_ms: int) -> None:
        """Hear the router's word on a request."""
        if reply.reason == "requests_per_min":
            self._closed[tenant] = _Closed(limits=limits, reply=reply, told_ms=now_ms)
            self._closed.move_to_end(tenant)
        while len(self._closed) > MAX_TENANTS:
            self._closed.popitem(last=False)

    def refusal(self, tenant: str, limits: TenantLimits, now_ms: int) -> AdmitReply | None:
        """What the router would say now, if that is known without asking."""
        closed = self._closed.get(tenant)
        if closed is None:
            return None
        passed_ms = now_ms - closed.told_ms
        left_ms = closed.reply.retry_after_ms - passed_ms
        if left_ms <= 0 or limits != closed.limits:
            del self._closed[tenant]
            return None
        return replace(
            closed.reply,
            retry_after_ms=left_ms,
            requests=_later(closed.reply.requests, passed_ms),
            tokens=_later(closed.reply.tokens, passed_ms),
        )

    def forget(self) -> None:
        """Another router counts from now on."""
        self._closed.clear()


def _later(rate: RateState | None, passed_ms: int) -> RateState | None:
    return None if rate is None else replace(rate, reset_ms=max(0, rate.reset_ms - passed_ms))
