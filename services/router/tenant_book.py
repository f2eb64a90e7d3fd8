"""What each tenant may still do: requests and tokens a minute, and requests at once. Pure.

A request is admitted once, by its gateway's name and its own id, and holds a place and the tokens
that it may need until its gateway settles it. Gateways say now and then which they hold; what no
gateway has spoken of for a lease is let go. Time comes in as an argument.

After a restart the minute counts begin at nothing, and gateways bring back what they hold.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from finback.services.router.rate_bucket import Bucket
from finback.services.router.verdict import TenantLimits, Verdict, rate_of, to_us

LEASE_S: Final = 6.0
# A place may become free at any moment.
CONCURRENCY_RETRY_US: Final = 1_000_000
MAX_HELD: Final = 65_536
MAX_TENANTS: Final = 65_536

Key = tuple[str, str]  # (gateway, request id)


@dataclass(slots=True)
class _Held:
    """`bucket`: where `reserved` tokens were charged, up to `end`; None: nowhere."""

    tenant: str
    seen_us: int
    bucket: Bucket | None = None
    reserved: int = 0
    end: int = 0


class TenantBook:
    """Buckets by tenant, and held requests by gateway and id, the least recently seen first."""

    def __init__(self, *, lease_s: float = LEASE_S) -> None:
        self._lease_us = to_us(lease_s)
        self._requests: OrderedDict[str, Bucket] = OrderedDict()
        self._tokens: OrderedDict[str, Bucket] = OrderedDict()
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._open: Counter[str] = Counter()

    def admit(
        self,
        key: Key,
        tenant: str,
        limits: TenantLimits,
        *,
        num_prompt_tokens: int,
        num_most_tokens: int,
        now_us: int,
    ) -> Verdict:
        """Let a request in, or say why not. `num_most_tokens`, the prompt's among them, are reserved.

        The same request again is the same admission. Nothing is used by one that is refused.
        """
        self._expire(now_us)
        requests = _bucket(self._requests, tenant, limits.requests_per_min, now_us)
        tokens = _bucket(self._tokens, tenant, limits.tokens_per_min, now_us)
        refused = None
        if key not in self._held:
            refused = self._refusal(
                tenant, limits, requests, tokens, num_prompt_tokens, num_most_tokens
            )
            if refused is None:
                self._hold(key, tenant, requests, tokens, num_most_tokens, now_us)
        return replace(
            refused or Verdict(),
            num_open=self._open[tenant],
            requests=rate_of(requests),
            tokens=rate_of(tokens),
        )

    def settle(self, key: Key, num_tokens: int, now_us: int) -> None:
        """A request is over and used `num_tokens`; one that is not held is none of ours."""
        held = self._held.pop(key, None)
        if held is None:
            return
        self._leave(held.tenant)
        bucket = held.bucket or self._tokens.get(held.tenant)
        if bucket is None:
            return
        bucket.advance(now_us)
        if num_tokens > held.reserved:
            bucket.charge(num_tokens - held.reserved)
        else:
            bucket.give_back(held.end, held.reserved, held.reserved - num_tokens)

    def renew(self, held: Iterable[tuple[Key, str]], now_us: int) -> None:
        """A gateway holds these (key, tenant); those that are new to us take their place again."""
        for key, tenant in held:
            known = self._held.get(key)
            if known is not None:
                known.seen_us = now_us
                self._held.move_to_end(key)
            elif len(self._held) < MAX_HELD:
                self._held[key] = _Held(tenant, now_us)
                self._open[tenant] += 1

    def sweep(self, now_us: int) -> None:
        """Let go what no gateway speaks of, and forget tenants that have used nothing lately."""
        self._expire(now_us)
        for buckets in (self._requests, self._tokens):
            for tenant, bucket in tuple(buckets.items()):
                bucket.advance(now_us)
                if bucket.is_empty and not self._open[tenant]:
                    del buckets[tenant]

    def num_open(self, tenant: str) -> int:
        """Requests that hold a place."""
        return self._open[tenant]

    @property
    def num_known(self) -> int:
        """Tenants of which anything is remembered."""
        return len(self._requests.keys() | self._tokens.keys() | self._open.keys())

    def _refusal(
        self,
        tenant: str,
        limits: TenantLimits,
        requests: Bucket | None,
        tokens: Bucket | None,
        num_prompt_tokens: int,
        num_most_tokens: int,
    ) -> Verdict | None:
        if tokens is not None and num_prompt_tokens > tokens.limit:
            return Verdict(reason="tokens_per_min", is_hopeless=True)
        waits: list[tuple[int, str]] = []
        if limits.max_concurrency and self._open[tenant] >= limits.max_concurrency:
            waits.append((CONCURRENCY_RETRY_US, "tenant_concurrency"))
        if len(self._held) >= MAX_HELD:
            waits.append((CONCURRENCY_RETRY_US, "too_many_held"))
        if requests is not None and (wait_us := requests.wait_us(1)):
            waits.append((wait_us, "requests_per_min"))
        if tokens is not None and (wait_us := tokens.wait_us(num_most_tokens)):
            waits.append((wait_us, "tokens_per_min"))
        if not waits:
            return None
        retry_after_us, reason = max(waits)
        return Verdict(reason=reason, retry_after_us=retry_after_us)

    def _hold(
        self,
        key: Key,
        tenant: str,
        requests: Bucket | None,
        tokens: Bucket | None,
        num_most_tokens: int,
        now_us: int,
    ) -> None:
        if requests is not None:
            requests.charge(1)
        held = self._held[key] = _Held(tenant, now_us, tokens)
        if tokens is not None:
            # More than a bucket cannot be reserved; what it really used is charged at its end.
            held.reserved = min(num_most_tokens, tokens.limit)
            held.end = tokens.charge(held.reserved)
        self._open[tenant] += 1

    def _expire(self, now_us: int) -> None:
        while self._held:
            key, held = next(iter(self._held.items()))
            if now_us - held.seen_us <= self._lease_us:
                return
            del self._held[key]
            self._leave(held.tenant)

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if self._open[tenant] <= 0:
            del self._open[tenant]


def _bucket(
    buckets: OrderedDict[str, Bucket], tenant: str, limit: int, now_us: int
) -> Bucket | None:
    """The tenant's bucket under today's limit; None without a limit."""
    if not limit:
        buckets.pop(tenant, None)
        return None
    bucket = buckets.get(tenant)
    if bucket is None:
        bucket = buckets[tenant] = Bucket(limit=limit, at_us=now_us)
        while len(buckets) > MAX_TENANTS:
            buckets.popitem(last=False)
    buckets.move_to_end(tenant)
    bucket.set_limit(limit, now_us)
    return bucket
