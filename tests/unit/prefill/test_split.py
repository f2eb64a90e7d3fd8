"""Which part of a prompt prefill computes and hands over."""

from hypothesis import given
from hypothesis import strategies as st

from finback.services.prefill.split import ready_blocks, split_prompt, tokens_in_block

BLOCK = 64


def test_one_token_needs_nothing() -> None:
    split = split_prompt(1, 0, 0, BLOCK)
    assert split.is_empty and split.num_tokens == 0 and split.num_blocks == 0


def test_cold_prompt_is_handed_over_whole() -> None:
    split = split_prompt(200, 0, 0, BLOCK)
    assert (split.first_block, split.num_blocks, split.num_tokens) == (0, 4, 199)
    assert tokens_in_block(3, split, BLOCK) == 199 - 192


def test_what_decode_has_is_skipped() -> None:
    split = split_prompt(200, 128, 128, BLOCK)
    assert (split.first_block, split.num_blocks) == (2, 4)


def test_next_turn_is_left_to_decode() -> None:
    # Decode has all but 7 tokens; prefill would have to compute 1,000 it never saw.
    assert split_prompt(1032, 1024, 0, BLOCK).is_empty


def test_short_cold_prompt_is_not_left_to_decode() -> None:
    assert not split_prompt(20, 0, 0, BLOCK).is_empty


@given(
    n=st.integers(1, 5000),
    at_decode=st.integers(0, 80),
    here=st.integers(0, 80),
    block=st.sampled_from([1, 16, 64, 128]),
)
def test_blocks_cover_exactly_what_decode_lacks(
    n: int, at_decode: int, here: int, block: int
) -> None:
    at_decode, here = min(at_decode * block, n - 1), min(here * block, n - 1)
    split = split_prompt(n, at_decode, here, block)
    assert split.num_tokens == n - 1
    if not split.is_empty:
        sizes = [tokens_in_block(i, split, block) for i in range(split.num_blocks)]
        assert all(0 < size <= block for size in sizes)
        assert sum(sizes) == n - 1
        assert split.first_block * block <= at_decode


@given(n=st.integers(2, 2000), computed=st.lists(st.integers(0, 2000)), block=st.integers(1, 100))
def test_ready_blocks_never_shrink_and_end_whole(n: int, computed: list[int], block: int) -> None:
    split = split_prompt(n, 0, 0, block)
    ready = [ready_blocks(min(c, n - 1), split, block) for c in sorted(computed)]
    assert ready == sorted(ready)
    assert all(r <= split.num_blocks for r in ready)
    assert ready_blocks(n - 1, split, block) == split.num_blocks


def test_decode_computes_what_the_router_says() -> None:
    assert split_prompt(20, 0, 0, BLOCK, 32).is_empty
    assert split_prompt(1300, 1024, 0, BLOCK, 275).is_empty
    assert not split_prompt(1300, 1024, 0, BLOCK, 274).is_empty
