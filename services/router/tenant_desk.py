"""Tenants' limits on the bus: answers `admit`, hears gateways' ledgers."""

from finback.services.router.tenant_book import TenantBook
from finback.services.router.verdict import Rate, TenantLimits, to_us
from finback.shared.actor.endpoint import Call
from finback.shared.clock import monotonic_s
from finback.shared.telemetry import tracing
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.route import (
    AdmitReply,
    AdmitRequest,
    RateState,
    TenantLedger,
)


class TenantDesk:
    """The book, its clock, and the messages that it is told and asked by."""

    def __init__(self, metrics: Metrics) -> None:
        self.book = TenantBook()
        self._metrics = metrics

    async def admit(self, call: Call[AdmitRequest]) -> AdmitReply:
        """Hear what has ended, then judge."""
        request = call.message
        now_us = to_us(monotonic_s())
        self._settle(request.gateway, request.settled, now_us)
        verdict = self.book.admit(
            (request.gateway, request.request_id),
            request.tenant,
            TenantLimits(
                requests_per_min=request.requests_per_min,
                tokens_per_min=request.tokens_per_min,
                max_concurrency=request.max_concurrency,
            ),
            num_prompt_tokens=request.num_prompt_tokens,
            num_most_tokens=request.num_most_tokens,
            now_us=now_us,
        )
        if verdict.reason:
            self._metrics.count("finback.router.refused", reason=verdict.reason)
        tracing.annotate(finback__refused=verdict.reason, finback__tenant_open=verdict.num_open)
        return AdmitReply(
            reason=verdict.reason,
            retry_after_ms=-(-verdict.retry_after_us // 1000),
            is_hopeless=verdict.is_hopeless,
            num_open=verdict.num_open,
            requests=_state(verdict.requests),
            tokens=_state(verdict.tokens),
        )

    def hear(self, ledger: TenantLedger) -> None:
        """What a gateway holds, and what of it has ended."""
        now_us = to_us(monotonic_s())
        self.book.renew((((ledger.gateway, i), tenant) for i, tenant in ledger.held), now_us)
        self._settle(ledger.gateway, ledger.settled, now_us)

    def sweep(self) -> None:
        """Forget what has run out."""
        self.book.sweep(to_us(monotonic_s()))

    def _settle(self, gateway: str, settled: tuple[tuple[str, int], ...], now_us: int) -> None:
        for request_id, num_tokens in settled:
            self.book.settle((gateway, request_id), num_tokens, now_us)


def _state(rate: Rate | None) -> RateState | None:
    if rate is None:
        return None
    reset_ms = -(-rate.reset_us // 1000)
    return RateState(limit=rate.limit, remaining=rate.remaining, reset_ms=reset_ms)
