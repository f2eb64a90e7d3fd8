"""What lines of the key file allow; limits and headers in each dialect."""

import json
from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.gateway.accounts import Accounts
from finback.services.gateway.caller import Caller
from finback.services.gateway.grant import Grant, TenantLimits, grants_of, read_line
from finback.services.gateway.rate_headers import duration, rate_headers
from finback.shared.config import StackConfig
from finback.shared.errors import PermissionDenied
from finback.shared.wire.messages.route import AdmitReply, RateState


def grants(*records: dict[str, object]) -> dict[str, Grant]:
    lines = [read_line(json.dumps({"id": r["hash"], **r})) for r in records]
    return dict(grants_of([line for line in lines if line is not None]))


def test_an_old_line_is_a_tenant_of_its_own() -> None:
    found = grants({"hash": "A1", "name": "n", "created": 0, "revoked": False})["a1"]
    assert (found.tenant, sorted(found.scopes)) == ("A1", ["inference"])
    assert found.limits.or_else(TenantLimits(requests_per_min=5)).requests_per_min == 5


def test_of_a_tenants_keys_the_strictest_limits_hold_for_all() -> None:
    found = grants(
        {"hash": "1", "tenant": "t", "requests_per_min": 9, "max_concurrency": 0},
        {"hash": "2", "tenant": "t", "requests_per_min": 7, "tokens_per_min": 5},
        {"hash": "3", "tenant": "t", "requests_per_min": 1, "revoked": True},
        {"hash": "4", "tenant": "u"},
    )
    expected = TenantLimits(requests_per_min=7, tokens_per_min=5, max_concurrency=0)
    assert found["1"].limits == found["2"].limits == expected
    assert "3" not in found
    assert found["4"].limits.is_unlimited


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "{}", '{"hash": 1}', '{"id": "x", "hash": "y", "scopes": ["root"]}',
     '{"id": "x", "hash": "y", "requests_per_min": -1}',
     '{"id": "x", "hash": "y", "expires": "soon"}'],
)  # fmt: skip
def test_a_broken_line_is_no_key(line: str) -> None:
    assert read_line(line) is None


def test_scopes_and_models() -> None:
    Grant().check_endpoint("chat.completions")
    with pytest.raises(PermissionDenied, match="not inference"):
        Grant(scopes=frozenset({"usage"})).check_endpoint("messages")
    Grant(scopes=frozenset({"usage"})).check_endpoint("usage")
    assert Grant(scopes=frozenset({"admin"})).may("usage")
    Grant(models=frozenset({"m"})).check_model("alias", "m")
    with pytest.raises(PermissionDenied, match="may not use the model 'x'"):
        Grant(models=frozenset({"m"})).check_model("x", "y")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (1, "1ms"), (20, "20ms"), (1000, "1s"), (1500, "1.5s"), (60_000, "1m0s"),
     (360_000, "6m0s"), (90_951, "1m30.951s"), (3_600_000, "1h0m0s")],
)  # fmt: skip
def test_durations_as_openai_writes_them(ms: int, text: str) -> None:
    assert duration(ms) == text


@given(st.integers(0, 10**8))
def test_durations_say_what_they_mean(ms: int) -> None:
    text, total = duration(ms), 0.0
    if text.endswith("ms"):
        total = int(text[:-2])
    else:
        hours, _, rest = text[:-1].rpartition("h")
        minutes, _, seconds = rest.rpartition("m")
        total = (int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(seconds)) * 1000
    assert round(total) == ms


def test_headers_of_both_dialects() -> None:
    reply = AdmitReply(requests=RateState(limit=60, remaining=59, reset_ms=1000))
    now = datetime(2026, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC)
    assert rate_headers(reply, "openai", now) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
    }
    assert rate_headers(reply, "anthropic", now) == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-requests-reset": "2026-01-02T03:04:07Z",
    }
    hopeless = AdmitReply(reason="tokens_per_min", is_hopeless=True)
    assert rate_headers(hopeless, "openai", now) == {"x-should-retry": "false"}


def test_what_keys_do_not_say_the_settings_do() -> None:
    config = StackConfig(tenant_requests_per_min=5, max_tenant_requests=2)
    parts: Any = Mock()  # not looked at
    accounts = Accounts(parts, parts, config, "m")
    limits = TenantLimits(tokens_per_min=9, max_concurrency=0)
    caller = Caller(request_id="r", tenant="t", grant=Grant(limits=limits))
    expected = TenantLimits(requests_per_min=5, tokens_per_min=9, max_concurrency=0)
    assert accounts.limits_of(caller) == expected
    assert not accounts.limits_of(Caller(request_id="r")).is_unlimited
    assert Accounts(parts, parts, StackConfig(), "m").limits_of(caller).requests_per_min == 0
