"""Who is let in, and what the others are told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.router.admission import RETRY_MAX_S, RETRY_MIN_S, Limits, has_room, refusal
from finback.services.router.fleet import Fleet, Worker
from finback.shared.errors import InvalidRequest, Overloaded, ServingError

LIMITS = Limits(max_queue=8)


def decode(name: str = "d", **more: object) -> Worker:
    values: dict[str, object] = {"num_blocks": 100, "num_free_blocks": 50, **more}
    return Worker(
        instance=name,
        epoch=1,
        is_prefill=False,
        is_decode=True,
        **values,  # type: ignore[arg-type]  # named by each test
    )


def refused(workers: list[Worker], prompt: int = 100) -> ServingError | None:
    return refusal(workers, LIMITS, num_prompt_tokens=prompt)


def test_a_queue_up_to_its_limit() -> None:
    assert refused([decode(num_waiting=7)]) is None
    error = refused([decode(num_waiting=8)])
    assert isinstance(error, Overloaded)
    assert error.reason == "queue_full"
    assert error.http_status == 429


def test_one_instance_with_room_is_enough() -> None:
    assert refused([decode("a", num_waiting=99), decode("b", num_waiting=7)]) is None


def test_without_free_blocks_the_queue_is_shorter() -> None:
    assert refused([decode(num_free_blocks=0, num_waiting=1)]) is None
    assert isinstance(refused([decode(num_free_blocks=0, num_waiting=2)]), Overloaded)
    assert refused([decode(num_free_blocks=3, num_waiting=2)]) is None


@pytest.mark.parametrize(
    ("waiting", "speed", "retry_after_s"),
    [(8, 0.0, RETRY_MAX_S), (8, 1e6, RETRY_MIN_S), (10, 64.0, 10.0)],
)
def test_retry_after_follows_the_queue(waiting: int, speed: float, retry_after_s: float) -> None:
    error = refused([decode(num_waiting=waiting, tokens_per_s=speed)])
    assert error is not None
    assert error.retry_after_s == retry_after_s


def test_what_never_fits_is_an_invalid_request() -> None:
    error = refused([decode(num_blocks=4)], prompt=64 * 4)
    assert isinstance(error, InvalidRequest)
    assert "256 tokens" in error.public_message
    assert "192" in error.public_message
    assert refused([decode(num_blocks=4), decode("b")], prompt=64 * 4) is None
    assert refused([decode(num_blocks=0, num_free_blocks=0)], prompt=64 * 4) is None


def test_nobody_there_is_not_for_admission_to_say() -> None:
    assert refused([]) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(0, 10), st.integers(0, 4), st.integers(0, 12)
        ),
        max_size=4,
        unique_by=lambda item: item[0],
    ),
    st.integers(1, 600),
    st.integers(1, 3),
    st.sets(st.sampled_from("abc"), max_size=1),
)
def test_columns_say_the_same_as_workers(
    rows: list[tuple[str, int, int, int]], prompt: int, num_choices: int, excluded: set[str]
) -> None:
    workers = [
        decode(name, num_blocks=blocks, num_free_blocks=min(free, blocks), num_waiting=waiting)
        for name, blocks, free, waiting in rows
    ]
    sizes = {"num_prompt_tokens": prompt, "num_choices": num_choices}
    allowed = [w for w in workers if w.instance not in excluded]
    if has_room(Fleet(workers), LIMITS, **sizes, excluded=excluded):
        assert refusal(allowed, LIMITS, **sizes) is None
    elif refusal(allowed, LIMITS, **sizes) is None:
        # Some are too small and the others full: nobody is refused early, the queue decides.
        assert not allowed or any(w.num_blocks for w in allowed)
