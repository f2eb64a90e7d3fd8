"""`GET /v1/usage` and `api.usage`: what tenants have used, by the hour.

A key sees its own tenant's; one with the scope `usage` sees all, as everybody does without keys.
"""

import asyncio
import sqlite3
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import Field

from finback.services.gateway.body import parse_object
from finback.services.gateway.caller import Caller
from finback.services.gateway.openai_format import to_json
from finback.services.gateway.schema import Model
from finback.services.gateway.sink import Sink
from finback.services.gateway.usage_meter import UsageMeter
from finback.services.gateway.validation import check
from finback.shared import durations
from finback.shared.clock import unix_s
from finback.shared.errors import InvalidRequest, PermissionDenied, Unavailable
from finback.shared.usage_store import UsageCounts, UsageKey

MAX_ROWS: Final = 10_000


class UsageRequest(Model):
    """`since`: how far back, as `24h` or `30d`."""

    tenant: Annotated[str, Field(max_length=64)] | None = None
    since: Annotated[str, Field(max_length=20)] = "24h"


class UsageApi:
    """Reads what the meters of this host have written."""

    def __init__(self, meter: UsageMeter) -> None:
        self._meter = meter

    async def usage(self, body: bytes, caller: Caller, sink: Sink) -> None:
        """Rows of (hour, tenant, model, outcome), oldest first, and their sum."""
        request = check(parse_object(body) if body.strip() else {}, UsageRequest)
        tenant = _visible(request.tenant, caller)
        try:
            since_s = unix_s() - durations.seconds_of(request.since)
        except ValueError as error:
            raise InvalidRequest(str(error), param="since", reason="invalid_value") from error
        rows = await self._read(since_s, tenant)
        has_more, rows = len(rows) > MAX_ROWS, rows[:MAX_ROWS]
        total = sum((counts for _, counts in rows), UsageCounts())
        document = {
            "object": "usage",
            "since": _iso(since_s),
            "data": [_fields(key, counts) for key, counts in rows],
            "total": _numbers(total),
            "has_more": has_more,
        }
        await sink.reply(200, to_json(document))

    async def _read(self, since_s: float, tenant: str | None) -> list[tuple[UsageKey, UsageCounts]]:
        await self._meter.flush()
        store = self._meter.store
        try:
            return await asyncio.to_thread(
                store.read, since_s=since_s, tenant=tenant, limit=MAX_ROWS + 1
            )
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"usage cannot be read: {error}", reason="usage") from error


def _visible(asked: str | None, caller: Caller) -> str | None:
    """Which tenant's rows to show; None: all."""
    if caller.grant.may("usage"):
        return asked
    if asked is not None and asked != caller.tenant:
        raise PermissionDenied(
            "This API key may read its own tenant's usage only: others need the scope usage.",
            param="tenant",
            reason="scope",
        )
    return caller.tenant


def _fields(key: UsageKey, counts: UsageCounts) -> dict[str, Any]:
    return {
        "hour": _iso(key.hour_s),
        "tenant": key.tenant,
        "model": key.model,
        "outcome": key.outcome,
        **_numbers(counts),
    }


def _numbers(counts: UsageCounts) -> dict[str, int]:
    return {
        "requests": counts.num_requests,
        "prompt_tokens": counts.num_prompt_tokens,
        "cached_tokens": counts.num_cached_tokens,
        "completion_tokens": counts.num_completion_tokens,
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
