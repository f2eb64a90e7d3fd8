"""Prefix overlap against a twin that keeps every placement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.router.prefix_book import PrefixBook, split_hashes

INSTANCES = ["a", "b", "c"]
# Prompts as paths in a small tree: equal beginnings share hashes, as chained hashes do.
PATHS = st.lists(st.integers(0, 1), max_size=5).map(
    lambda path: [bytes([len(path[: i + 1]), *path[: i + 1]]) for i in range(len(path))]
)


@given(st.lists(st.tuples(PATHS, st.sampled_from(INSTANCES)), max_size=20), PATHS)
def test_hits_are_the_longest_common_prefixes(
    placements: list[tuple[list[bytes], str]], asked: list[bytes]
) -> None:
    book = PrefixBook()
    for hashes, instance in placements:
        book.note(hashes, [instance])
    expected: dict[str, int] = {}
    for hashes, instance in placements:
        common = 0
        for mine, theirs in zip(asked, hashes, strict=False):
            if mine != theirs:
                break
            common += 1
        expected[instance] = max(expected.get(instance, 0), common)
    assert book.hits(asked) == {name: n for name, n in expected.items() if n}


@given(st.lists(st.tuples(PATHS, st.sampled_from(INSTANCES)), max_size=30), st.integers(1, 8))
def test_it_stays_within_its_capacity_and_never_invents(
    placements: list[tuple[list[bytes], str]], capacity: int
) -> None:
    small, large = PrefixBook(capacity), PrefixBook()
    for hashes, instance in placements:
        small.note(hashes, [instance])
        large.note(hashes, [instance])
        assert len(small) <= capacity
        known = large.hits(hashes)
        assert all(depth <= known[name] for name, depth in small.hits(hashes).items())


def test_the_start_of_a_prompt_is_forgotten_last() -> None:
    book = PrefixBook(2)
    book.note([b"1", b"2", b"3"], ["a"])
    assert book.hits([b"1", b"2", b"3"]) == {"a": 2}


def test_a_lost_instance_is_forgotten() -> None:
    book = PrefixBook()
    book.note([b"1"], ["a", "b"])
    book.note([b"2"], ["a"])
    book.forget("a")
    assert book.hits([b"1"]) == {"b": 1}
    assert book.hits([b"2"]) == {}
    assert len(book) == 1


def test_split_hashes() -> None:
    assert split_hashes(b"") == []
    assert split_hashes(b"a" * 32 + b"b" * 32) == [b"a" * 32, b"b" * 32]
    with pytest.raises(ValueError, match="multiple of 32"):
        split_hashes(b"a" * 33)
