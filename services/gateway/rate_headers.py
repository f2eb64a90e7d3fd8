"""Where a tenant stands, as the headers of each API tell it. Pure."""

import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from finback.services.gateway.error_envelope import Dialect
from finback.shared.wire.messages.route import AdmitReply, RateState


def rate_headers(reply: AdmitReply, dialect: Dialect, now: datetime) -> dict[str, str]:
    """The headers of an answer; nothing about limits that there are none of. `now`: wall clock."""
    headers = dict(_rates(reply, dialect, now))
    if reply.is_hopeless:
        headers["x-should-retry"] = "false"
    return headers


def _rates(reply: AdmitReply, dialect: Dialect, now: datetime) -> Iterator[tuple[str, str]]:
    for kind, rate in (("requests", reply.requests), ("tokens", reply.tokens)):
        if rate is None:
            continue
        if dialect == "anthropic":
            yield from _anthropic(kind, rate, now)
        else:
            yield f"x-ratelimit-limit-{kind}", str(rate.limit)
            yield f"x-ratelimit-remaining-{kind}", str(rate.remaining)
            yield f"x-ratelimit-reset-{kind}", duration(rate.reset_ms)


def _anthropic(kind: str, rate: RateState, now: datetime) -> Iterator[tuple[str, str]]:
    # To the second, and never before it is true.
    reset = now.astimezone(UTC) + timedelta(milliseconds=rate.reset_ms)
    whole = datetime.fromtimestamp(math.ceil(reset.timestamp()), UTC)
    yield f"anthropic-ratelimit-{kind}-limit", str(rate.limit)
    yield f"anthropic-ratelimit-{kind}-remaining", str(rate.remaining)
    yield f"anthropic-ratelimit-{kind}-reset", whole.strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(ms: int) -> str:
    """As OpenAI writes it: `0s`, `20ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds
