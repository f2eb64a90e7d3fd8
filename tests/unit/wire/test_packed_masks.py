"""Packed bitmasks come back as they were; what is no such thing is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.wire.packed_masks import only_token, pack_masks, unpack_masks

NUM_WORDS = 97


def mask_of(token_ids: list[int]) -> bytes:
    mask = bytearray(4 * NUM_WORDS)
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(mask)


ids = st.integers(0, 32 * NUM_WORDS - 1)
masks = st.one_of(
    st.lists(ids, max_size=3).map(mask_of),
    st.lists(ids, min_size=65, max_size=200).map(mask_of),
    st.sampled_from([mask_of([]), mask_of([5]), b"\xff" * 4 * NUM_WORDS]),
)


@given(st.lists(masks, max_size=12))
def test_they_come_back(given_masks: list[bytes]) -> None:
    packed = pack_masks(given_masks)
    assert unpack_masks(packed, len(given_masks), 4 * NUM_WORDS) == tuple(given_masks)
    assert len(packed) <= sum(2 + len(mask) for mask in given_masks)


@given(st.lists(masks, min_size=1, max_size=4), st.data())
def test_pieces_are_refused(given_masks: list[bytes], data: st.DataObject) -> None:
    packed = pack_masks(given_masks)
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    with pytest.raises(ValueError, match="packed"):
        unpack_masks(cut, len(given_masks), 4 * NUM_WORDS)


@given(st.binary(max_size=40), st.integers(0, 5))
def test_any_bytes_are_masks_or_refused(data: bytes, num_masks: int) -> None:
    try:
        found = unpack_masks(data, num_masks, 8)
    except ValueError:
        return
    assert [len(mask) for mask in found] == [8] * num_masks


@given(masks)
def test_the_only_token(mask: bytes) -> None:
    bits = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    assert only_token(mask) == (int(bits[0]) if bits.size == 1 else None)
