import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from finback.shared.kv import block_hash

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def _array(tokens: list[int]) -> block_hash.TokenIds:
    return np.array(tokens, dtype=np.int32)


def test_golden_chain_never_changes() -> None:
    hashes = block_hash.chain(np.arange(9, dtype=np.int32), 4, b"key", b"salt")
    assert [h.hex()[:16] for h in hashes] == ["14c50a703ec64054", "6c0e1fc42557e6d9"]


@given(tokens=TOKENS, size=st.integers(1, 8))
def test_only_full_blocks_have_a_hash(tokens: list[int], size: int) -> None:
    hashes = block_hash.chain(_array(tokens), size, b"", b"")
    assert len(hashes) == len(tokens) // size
    assert all(len(h) == block_hash.HASH_BYTES for h in hashes)


@given(one=TOKENS, other=TOKENS, size=st.integers(1, 4))
def test_equal_hashes_are_equal_prefixes(one: list[int], other: list[int], size: int) -> None:
    pairs = zip(
        block_hash.chain(_array(one), size, b"k", b"s"),
        block_hash.chain(_array(other), size, b"k", b"s"),
        strict=False,
    )
    for index, (left, right) in enumerate(pairs):
        end = (index + 1) * size
        assert (left == right) == (one[:end] == other[:end])


@given(tokens=st.lists(st.integers(0, 99), min_size=4, max_size=40))
def test_chain_is_made_of_extends(tokens: list[int]) -> None:
    parent = block_hash.root(b"k", b"s")
    for index, got in enumerate(block_hash.chain(_array(tokens), 4, b"k", b"s")):
        data = _array(tokens[4 * index : 4 * index + 4]).tobytes()
        parent = block_hash.extend(parent, data, b"k")
        assert got == parent


def test_key_and_salt_keep_prefixes_apart() -> None:
    tokens = np.arange(4, dtype=np.int32)
    chains = {block_hash.chain(tokens, 4, k, s)[0] for k in (b"", b"a") for s in (b"", b"a")}
    assert len(chains) == 4


def test_block_size_is_checked() -> None:
    with pytest.raises(ValueError, match="block_size"):
        block_hash.chain(np.arange(4, dtype=np.int32), 0, b"", b"")
