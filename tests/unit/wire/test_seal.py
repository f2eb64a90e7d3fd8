"""A body that was damaged on its way is refused, wherever the damage lies."""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.errors import WireError
from finback.shared.wire import codec
from finback.shared.wire.messages.cache import LeaseRequest
from finback.shared.wire.messages.generate import TokenBatch, TokenRow

BATCH = TokenBatch(
    epoch=7,
    step=2,
    rows=tuple(
        TokenRow(request_id=f"r{i}", choice=0, attempt=1, offset=i, token_ids=bytes(range(8)))
        for i in range(3)
    ),
)


def test_every_single_flipped_bit_is_found() -> None:
    body = codec.encode(BATCH)
    for position in range(len(body) * 8):
        damaged = bytearray(body)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(WireError):
            codec.decode(bytes(damaged), TokenBatch)


@given(st.lists(st.text(max_size=40), max_size=20), st.data())
def test_what_is_cut_lengthened_or_overwritten_is_found(
    ids: list[str], data: st.DataObject
) -> None:
    body = codec.encode(LeaseRequest(lease_ids=tuple(ids)))
    start = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(start, len(body)))
    damaged = body[:start] + data.draw(st.binary(max_size=30)) + body[end:]
    if damaged != body:
        with pytest.raises(WireError):
            codec.decode(damaged, LeaseRequest)


def test_bodies_without_a_seal_and_readers_without_eyes_for_it() -> None:
    assert codec.decode(codec.pack(BATCH), TokenBatch) == BATCH
    raw = msgpack.unpackb(codec.encode(BATCH))
    assert {key: raw[key] for key in ("epoch", "step")} == {"epoch": 7, "step": 2}
    assert codec.decode(memoryview(codec.encode(BATCH)), TokenBatch) == BATCH
