"""Where to begin, against a twin that tries every start and asks which rows are exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.errors import InvalidRequest
from finback.shared.kv.state import HEADER_BYTES, StateHeader, StatePart, StateSpec, read_header
from finback.shared.kv.state_policy import (
    ReplayRule,
    Start,
    capture_position,
    choose_start,
    exact_replay_tokens,
)


def _is_exact(start: int, hit: int, num_layers: int, window: int) -> bool:
    """Follow each row of each window layer: does what token `hit` sees depend on exact rows only?

    Layer 0's rows are exact from the start on; a row of the next is if the window below is.
    """
    exact = {row: row >= start for row in range(hit)}
    for _ in range(num_layers - 1):
        exact = {
            row: row >= start
            and all(exact[seen] for seen in range(max(0, row - window + 1), row + 1))
            for row in range(hit)
        }
    return all(exact[row] for row in range(max(0, hit - window + 1), hit))


@given(
    hit=st.integers(0, 40),
    num_layers=st.integers(1, 4),
    window=st.integers(1, 9),
    snapshots=st.sets(st.integers(0, 48), max_size=4),
)
def test_exact_start_is_the_latest_that_is_exact(
    hit: int, num_layers: int, window: int, snapshots: set[int]
) -> None:
    rule = ReplayRule(mode="exact", exact_tokens=exact_replay_tokens(num_layers, window))
    found = choose_start(hit, snapshots, rule)
    replays = [start for start in range(hit + 1) if _is_exact(start, hit, num_layers, window)]
    usable = [s for s in snapshots if 0 < s <= hit]
    assert found.position == max([*replays, *usable])
    assert (found.snapshot is not None) == (found.position in usable)
    assert found.snapshot in (None, found.position)


@given(
    hit=st.integers(0, 600),
    snapshots=st.sets(st.integers(0, 700), max_size=4),
    exact=st.integers(0, 300),
    bounded=st.integers(1, 300),
)
def test_bounded_start(hit: int, snapshots: set[int], exact: int, bounded: int) -> None:
    rule = ReplayRule(mode="bounded", exact_tokens=exact, bounded_tokens=bounded)
    found = choose_start(hit, snapshots, rule)
    usable = [s for s in snapshots if 0 < s <= hit]
    assert hit - found.position <= min(exact, bounded, hit)
    assert found.position >= max(usable, default=0)
    if usable and max(usable) >= hit - min(exact, bounded):
        assert found == Start(position=max(usable), snapshot=max(usable))


@given(hit=st.integers(0, 300), exact=st.integers(0, 90), align=st.integers(1, 16))
def test_replays_begin_where_entries_do(hit: int, exact: int, align: int) -> None:
    rule = ReplayRule(mode="exact", exact_tokens=exact, align_tokens=align)
    starts = [s for s in range(0, hit + 1, align) if hit - s >= min(exact, hit)]
    assert choose_start(hit, (), rule).position == max(starts)


@given(num_tokens=st.integers(1, 300), block_size=st.integers(1, 64))
def test_a_prompt_finds_its_own_snapshot(num_tokens: int, block_size: int) -> None:
    hits = [b for b in range(0, num_tokens, block_size) if b <= num_tokens - 1]
    assert capture_position(num_tokens, block_size) == max(hits)


def _spec() -> StateSpec:
    parts = (
        StatePart(name="window", num_layers=3, lookback_tokens=5, shape=(2, 2, 4), dtype="f32"),
        StatePart(
            name="pending",
            num_layers=1,
            lookback_tokens=0,
            period_tokens=8,
            shape=(8,),
            dtype="bf16",
        ),
    )
    return StateSpec(parts=parts, replay_tokens=15, window_tokens=6)


def test_sizes() -> None:
    spec = _spec()
    assert spec.payload_bytes == HEADER_BYTES + 5 * 3 * 16 * 4
    assert spec.payload_bytes_at(13) == spec.payload_bytes + 5 * 8 * 2
    assert spec.most_payload_bytes == spec.payload_bytes + 7 * 8 * 2
    assert spec.slot_bytes(5) == (5 + 1 + 5) * 3 * 16 * 4 + (0 + 8 + 5) * 8 * 2
    assert "window:3x5+1x(2, 2, 4):f32" in spec.describe()
    with pytest.raises(ValueError, match="dtype of x"):
        StatePart(name="x", num_layers=1, lookback_tokens=1, shape=(1,), dtype="f8")
    with pytest.raises(ValueError, match="sizes of x"):
        StatePart(name="x", num_layers=1, lookback_tokens=1, shape=(), dtype="f32")


def test_header() -> None:
    spec = _spec()
    payload = bytearray(spec.payload_bytes_at(128))
    header = StateHeader(position=128, floor=7)
    header.pack_into(memoryview(payload))
    assert read_header(payload, spec) == header
    StateHeader(position=3, floor=7).pack_into(memoryview(payload))
    with pytest.raises(InvalidRequest, match="a state at 3 cannot begin at 7"):
        read_header(payload, spec)
