"""The number of blocks worth fetching, against trying every number."""

from hypothesis import given
from hypothesis import strategies as st

from finback.shared.kv.fetch_policy import (
    EXPLORE_EVERY,
    FetchRates,
    RateBook,
    blocks_worth_fetching,
    gain_s,
)

seconds = st.integers(0, 12).map(lambda n: n / 8)  # exact in binary, so that ties are ties


@given(
    num_found=st.integers(0, 12),
    num_host=st.integers(0, 14),
    compute=seconds.filter(bool),
    overhead=seconds,
    host=seconds,
    file=seconds,
)
def test_no_other_number_spares_more(
    num_found: int, num_host: int, compute: float, overhead: float, host: float, file: float
) -> None:
    rates = FetchRates(
        compute_block_s=compute, overhead_s=overhead, host_block_s=host, file_block_s=file
    )
    chosen = blocks_worth_fetching(num_found, num_host, rates)
    assert 0 <= chosen <= num_found
    gains = [gain_s(count, min(num_host, num_found), rates) for count in range(num_found + 1)]
    assert gains[chosen] == max(gains)


def test_what_was_never_measured_is_tried() -> None:
    assert blocks_worth_fetching(7, 3, FetchRates()) == 7
    assert RateBook().choose(5, 5, compute_block_s=0.1) == 5


def test_a_slow_tier_is_left_alone_and_tried_again() -> None:
    book = RateBook()
    book.record("file", 1.0)
    book.record("host", 0.01)
    chosen = [book.choose(8, 3, compute_block_s=0.1) for _ in range(EXPLORE_EVERY)]
    assert chosen == [3] * (EXPLORE_EVERY - 1) + [8]
    for _ in range(20):
        book.record("file", 0.001)
    assert book.choose(8, 3, compute_block_s=0.1) == 8
