"""A refusal that is remembered is what the router would have said."""

from hypothesis import given
from hypothesis import strategies as st

from finback.services.gateway.closed_doors import MAX_TENANTS, ClosedDoors
from finback.services.gateway.grant import TenantLimits
from finback.services.router.tenant_book import TenantBook
from finback.services.router.verdict import TenantLimits as RouterLimits
from finback.services.router.verdict import Verdict
from finback.shared.wire.messages.route import AdmitReply, RateState

LIMITS = TenantLimits(requests_per_min=4)
REFUSED = AdmitReply(
    reason="requests_per_min",
    retry_after_ms=1000,
    requests=RateState(limit=4, remaining=0, reset_ms=60_000),
)


def test_until_its_time_or_other_limits() -> None:
    doors = ClosedDoors()
    assert doors.refusal("t", LIMITS, 0) is None
    doors.note("t", LIMITS, REFUSED, 500)
    later = doors.refusal("t", LIMITS, 1499)
    assert later is not None
    assert later.requests is not None
    assert (later.retry_after_ms, later.requests.reset_ms) == (1, 59_001)
    assert doors.refusal("u", LIMITS, 1000) is None
    assert doors.refusal("t", LIMITS, 1500) is None
    doors.note("t", LIMITS, REFUSED, 500)
    assert doors.refusal("t", TenantLimits(requests_per_min=5), 600) is None
    doors.note("t", LIMITS, REFUSED, 500)
    doors.forget()
    assert doors.refusal("t", LIMITS, 600) is None


def test_only_what_holds_for_every_request() -> None:
    doors = ClosedDoors()
    for reason in ("", "tokens_per_min", "tenant_concurrency"):
        doors.note("t", LIMITS, AdmitReply(reason=reason, retry_after_ms=1000), 0)
        assert doors.refusal("t", LIMITS, 1) is None
    for at in range(MAX_TENANTS + 1):
        doors.note(f"t{at}", LIMITS, REFUSED, 0)
    assert doors.refusal("t0", LIMITS, 1) is None
    assert doors.refusal("t1", LIMITS, 1) is not None


@given(st.lists(st.integers(0, 40_000), max_size=30))
def test_as_a_router_that_is_asked_each_time(pauses_ms: list[int]) -> None:
    doors, asked, spared = ClosedDoors(), TenantBook(), TenantBook()
    now_ms = 0
    for at, pause_ms in enumerate(pauses_ms):
        now_ms += pause_ms
        expected = _ask(asked, at, now_ms)
        told = doors.refusal("t", LIMITS, now_ms)
        if told is None:
            verdict = _ask(spared, at, now_ms)
            told = AdmitReply(
                reason=verdict.reason, retry_after_ms=-(-verdict.retry_after_us // 1000)
            )
            doors.note("t", LIMITS, told, now_ms)
        assert told.reason == expected.reason
        assert told.retry_after_ms == -(-expected.retry_after_us // 1000)


def _ask(book: TenantBook, at: int, now_ms: int) -> Verdict:
    return book.admit(
        ("g", str(at)),
        "t",
        RouterLimits(requests_per_min=4),
        num_prompt_tokens=1,
        num_most_tokens=1,
        now_us=now_ms * 1000,
    )
