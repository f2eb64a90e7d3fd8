"""Headers of requests and errors survive the trip, whatever text is in them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared import errors
from finback.shared.actor.deadline import Deadline
from finback.shared.actor.envelope import (
    deadline_of,
    error_headers,
    error_of,
    int_header,
    request_headers,
)
from finback.shared.actor.fence import Fence

KINDS = [
    errors.InvalidRequest,
    errors.NotFound,
    errors.PayloadTooLarge,
    errors.Overloaded,
    errors.DeadlineExceeded,
    errors.Cancelled,
    errors.Unavailable,
    errors.WireError,
]


@given(
    st.sampled_from(KINDS),
    st.text(max_size=100),
    st.none() | st.text(max_size=20),
    st.none() | st.floats(0, 1000),
)
def test_errors_survive(
    kind: type[errors.ServingError], text: str, param: str | None, retry_after_s: float | None
) -> None:
    headers = error_headers(kind(text, param=param, reason=param, retry_after_s=retry_after_s))
    for value in headers.values():
        assert value.isascii()
        assert value.isprintable() or not value
    found = error_of(headers)
    assert type(found) is kind
    assert found.public_message == text
    assert (found.param, found.reason) == (param, param)
    if retry_after_s is None:
        assert found.retry_after_s is None
    else:
        assert found.retry_after_s == pytest.approx(retry_after_s, abs=1e-3)


def test_an_error_of_another_service_framework_is_understood() -> None:
    found = error_of({"Nats-Service-Error": "went wrong", "Nats-Service-Error-Code": "500"})
    assert found is not None
    assert found.public_message == "went wrong"
    assert error_of({}) is None


def test_long_texts_are_cut() -> None:
    headers = error_headers(errors.InvalidRequest("x" * 100_000))
    assert sum(map(len, headers.values())) < 4096


def test_deadline_travels_as_remaining_time() -> None:
    headers = request_headers("a.B/1", timeout_s=1.5, request_id="r", attempt=2, epoch=7)
    assert headers["Finback-Deadline-Ms"] == "1500"
    assert 1.4 < deadline_of(headers).remaining_s() <= 1.5
    assert int_header(headers, "Finback-Epoch", 0) == 7
    assert deadline_of({}).remaining_s() == math.inf
    assert deadline_of({"Finback-Deadline-Ms": "soon"}).remaining_s() == math.inf
    assert "Finback-Deadline-Ms" not in request_headers("a.B/1", timeout_s=math.inf)


def test_deadline() -> None:
    assert Deadline.after(-1).is_expired
    assert Deadline.after(-1).remaining_s() == 0
    assert not Deadline.after(60).is_expired


def test_fence_lets_the_newest_attempt_through() -> None:
    fence = Fence(capacity=2)
    assert fence.admit("a", 1)
    assert fence.admit("a", 2)
    assert not fence.admit("a", 1)
    assert fence.admit("a", 2)
    assert fence.admit("", 0)
    assert fence.admit("b", 1) and fence.admit("c", 1)
    assert fence.admit("a", 1), "forgotten beyond its capacity"
