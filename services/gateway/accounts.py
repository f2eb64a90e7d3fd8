"""What a request costs its tenant: let in before it is placed, settled and counted at its end.

Once an answer's usage is known, and before the client is told it, the bill is settled: whoever sees
the end of an answer can send the next request. What a request that fails or is left has used until
then is counted under its own outcome, so that `completed` adds up to what clients were told.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final

from finback.services.gateway.admissions import Admissions, NeverFits, RateLimited, limited
from finback.services.gateway.answer_events import Usage
from finback.services.gateway.caller import Caller
from finback.services.gateway.generation import Choice, Generation
from finback.services.gateway.grant import TenantLimits
from finback.services.gateway.rate_headers import rate_headers
from finback.services.gateway.schema import MAX_TOKENS
from finback.services.gateway.usage_meter import UsageMeter
from finback.services.gateway.work import Work
from finback.shared.clock import unix_s
from finback.shared.config import StackConfig
from finback.shared.errors import Cancelled
from finback.shared.telemetry import tracing
from finback.shared.usage_store import UsageCounts
from finback.shared.wire.messages.route import AdmitReply

# Reserved for an answer that nobody set a limit to; what it uses beyond is charged at its end.
OPEN_ENDED_TOKENS: Final = 1024


class Accounts:
    """Opens bills."""

    def __init__(
        self, admissions: Admissions, meter: UsageMeter, config: StackConfig, model: str
    ) -> None:
        self.admissions = admissions
        self.meter = meter
        self._model = model
        self._defaults = TenantLimits(
            requests_per_min=config.tenant_requests_per_min,
            tokens_per_min=config.tenant_tokens_per_min,
            max_concurrency=config.max_tenant_requests,
        )

    @asynccontextmanager
    async def bill(self, caller: Caller) -> AsyncIterator["Bill"]:
        """The bill of one request; settled here at the latest."""
        bill = Bill(self, caller)
        try:
            yield bill
        except (RateLimited, NeverFits):
            bill.close("refused")
            raise
        except (asyncio.CancelledError, Cancelled):
            bill.close("cancelled")
            raise
        finally:
            bill.close("failed")

    def limits_of(self, caller: Caller) -> TenantLimits:
        """A tenant's own limits, else those of the settings."""
        return caller.grant.limits.or_else(self._defaults)

    def count(self, tenant: str, outcome: str, counts: UsageCounts) -> None:
        """To the meter, under the model's own name: aliases are one model."""
        self.meter.count(tenant, self._model, outcome, counts)


class Bill:
    """One request's. `generations`: set when there are some, for what is used without an end."""

    def __init__(self, accounts: Accounts, caller: Caller) -> None:
        self.generations: Sequence[Generation] = ()
        self._accounts = accounts
        self._caller = caller
        self._admission: str | None = None
        self._is_counted = False
        self._is_closed = False

    def check_early(self) -> None:
        """Raises `RateLimited` if nothing of the tenant's can come in, before work is made."""
        limits = self._accounts.limits_of(self._caller)
        reply = self._accounts.admissions.refusal(self._caller.tenant, limits)
        if reply is not None:
            self._is_counted = True
            self._heed(reply, limits)

    async def admit(self, work: Work) -> None:
        """Raises `RateLimited` or `NeverFits`. The caller's headers then say where its tenant stands."""
        limits = self._accounts.limits_of(self._caller)
        self._is_counted = True
        if limits.is_unlimited:
            return
        num_prompt = sum(prompt.num_tokens for prompt in work.prompts)
        most = OPEN_ENDED_TOKENS if work.is_open_ended else MAX_TOKENS
        num_answer = sum(min(most, s.max_tokens) for s in work.samplings) * len(work.choices)
        caller = self._caller
        with tracing.span("gateway admit"):
            admission, reply = await self._accounts.admissions.admit(
                caller.request_id,
                caller.tenant,
                limits,
                num_prompt_tokens=num_prompt,
                num_most_tokens=num_prompt + num_answer,
            )
        self._heed(reply, limits)
        self._admission = admission

    def settle(self, usage: Usage) -> None:
        """The answer is complete and used this."""
        self._end(
            "completed",
            UsageCounts(
                num_requests=1,
                num_prompt_tokens=usage.num_prompt_tokens,
                num_cached_tokens=usage.num_cached_tokens,
                num_completion_tokens=usage.num_completion_tokens,
            ),
        )

    def close(self, outcome: str) -> None:
        """It is over without a complete answer, unless it was settled before."""
        begun = [generation for generation in self.generations if generation.is_accepted]
        self._end(
            outcome,
            UsageCounts(
                num_requests=1,
                num_prompt_tokens=sum(len(g.spec.token_ids) // 4 for g in begun),
                num_completion_tokens=sum(_num_shown(c) for g in begun for c in g.choices),
            ),
        )

    def _heed(self, reply: AdmitReply, limits: TenantLimits) -> None:
        caller, now = self._caller, datetime.fromtimestamp(unix_s(), UTC)
        caller.headers.update(rate_headers(reply, caller.dialect, now))
        if reply.reason:
            raise limited(reply, caller.tenant, limits)

    def _end(self, outcome: str, counts: UsageCounts) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._admission is not None:
            num_tokens = counts.num_prompt_tokens + counts.num_completion_tokens
            admissions = self._accounts.admissions
            admissions.settle(self._admission, self._caller.tenant, num_tokens)
        if self._is_counted:
            self._accounts.count(self._caller.tenant, outcome, counts)


def _num_shown(choice: Choice) -> int:
    """Tokens of a choice that became part of the answer."""
    return choice.end.num_completion_tokens if choice.end is not None else choice.num_taken
