"""One flipped bit, anywhere: the right bytes or a miss, never wrong bytes."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finback.services.cache.segments.format import (
    PAGE,
    DeadHeader,
    ForeignSegment,
    RecordHeader,
    SegmentHeader,
    pack_dead,
    pack_record,
    pack_segment,
    parse_page,
    parse_segment,
    seal_page,
)
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.store import SegmentStore
from support.segments import KEY, Clocks, block, hash_of, open_store, payload_of, read

NUM_BLOCKS = 6
SIZE = 6000
KEYS = KeyRing(KEY)
FIXTURE = [
    HealthCheck.too_slow,
    HealthCheck.function_scoped_fixture,
]  # it is copied for each example


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        value = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([value ^ 1 << bit % 8]))


def _segment(folder: Path) -> Path:
    """The segment that holds the blocks (the others are empty)."""
    return max(folder.glob("local/seg-*.kv"), key=lambda path: path.stat().st_size)


@pytest.fixture(params=[{}, {"encrypt": True}, {"compress": True}], ids=["plain", "aes", "zstd"])
def filled(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    """A closed store with blocks, and its options."""
    store = open_store(tmp_path / "tier", **request.param)
    for number in range(NUM_BLOCKS):
        store.put(*block(number, SIZE, tenant="t"))
    store.close()
    return tmp_path / "tier", request.param


def _outcomes(store: SegmentStore) -> Iterator[str]:
    for number in range(NUM_BLOCKS):
        found = read(store, number, SIZE)
        if isinstance(found, bytes):
            assert found == payload_of(number, SIZE)
            yield "right"
        else:
            yield found


@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURE)
@given(data=st.data())
@pytest.mark.parametrize("when", ["running", "closed", "no index"])
def test_a_flipped_bit_of_a_segment_is_a_miss(
    filled: tuple[Path, dict[str, Any]], when: str, data: st.DataObject
) -> None:
    folder, options = filled
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    path = _segment(copy)
    bit = data.draw(st.integers(0, path.stat().st_size * 8 - 1))
    if when == "no index":
        (copy / "local" / "index.sqlite").unlink()
    if when != "running":
        flip(path, bit)
    store = open_store(copy, **options)
    if when == "running":
        flip(path, bit)
    found = list(_outcomes(store))
    in_header_page = bit < PAGE * 8
    assert found.count("right") >= (0 if in_header_page else NUM_BLOCKS - 1)
    # What was lost can be stored again.
    for number in range(NUM_BLOCKS):
        store.put(*block(number, SIZE, tenant="t"))
    assert list(_outcomes(store)) == ["right"] * NUM_BLOCKS
    store.check_integrity()
    store.close()


def test_every_flipped_payload_bit_that_is_read_is_detected(tmp_path: Path) -> None:
    rng = random.Random(6)
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks)
    num_flipped = num_detected = 0
    for _ in range(150):
        store.put(*block(1, SIZE))
        entry = store._state.index.get("salt-of-a-model", hash_of(1))
        assert entry is not None
        path = store._state.path_of(entry.place.segment_id)
        flip(path, (entry.place.offset + PAGE + rng.randrange(SIZE)) * 8 + rng.randrange(8))
        num_flipped += 1
        num_detected += read(store, 1, SIZE) == "corrupt"
    assert num_detected == num_flipped
    store.close()


@settings(max_examples=40, deadline=None, suppress_health_check=FIXTURE)
@given(data=st.data())
@pytest.mark.parametrize("num_bits", [1, 200])
def test_flipped_bits_of_the_index_are_misses(
    filled: tuple[Path, dict[str, Any]], num_bits: int, data: st.DataObject
) -> None:
    folder, options = filled
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    index = copy / "local" / "index.sqlite"
    seed = data.draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    for _ in range(num_bits):
        flip(index, rng.randrange(index.stat().st_size * 8))
    store = open_store(copy, **options)
    list(_outcomes(store))
    for number in range(NUM_BLOCKS):
        store.put(*block(number, SIZE, tenant="t"))
    list(_outcomes(store))
    store.sweep()
    store.close()


RECORD = RecordHeader(record=block(1, 100, tenant="t")[0], span=2 * PAGE, stored=100)


@given(st.integers(0, 2**62), st.integers(1, 2**30), st.data())
def test_a_header_page_says_what_was_written_or_nothing(
    segment_id: int, page_number: int, data: st.DataObject
) -> None:
    offset = page_number * PAGE
    keys = KEYS.of_segment(segment_id)
    live = seal_page(keys, segment_id, offset, pack_record(RECORD))
    dead = pack_dead(keys, segment_id, offset, DeadHeader(span=2 * PAGE, is_hole=True))
    assert parse_page(live.ljust(PAGE, b"\0"), keys, segment_id, offset) == RECORD
    assert parse_page(dead, keys, segment_id, offset) == DeadHeader(span=2 * PAGE, is_hole=True)
    assert parse_page(live, keys, segment_id, offset + PAGE) is None
    assert parse_page(live, keys, segment_id ^ 1, offset) is None
    assert parse_page(live, KeyRing(b"").of_segment(segment_id), segment_id, offset) is None
    bit = data.draw(st.integers(0, len(live) * 8 - 1))
    damaged = bytearray(live)
    damaged[bit // 8] ^= 1 << bit % 8
    assert parse_page(bytes(damaged), keys, segment_id, offset) is None
    cut = data.draw(st.integers(0, len(live) - 1))
    assert parse_page(live[:cut], keys, segment_id, offset) is None


@given(st.binary(max_size=PAGE))
def test_any_bytes_are_no_header(data: bytes) -> None:
    assert parse_page(data, KEYS.of_segment(1), 1, PAGE) is None
    with pytest.raises(ForeignSegment):
        parse_segment(data, KEYS.key_id)


@given(st.integers(0, PAGE * 8 - 1))
def test_a_segment_header_says_what_was_written_or_nothing(bit: int) -> None:
    header = SegmentHeader(segment_id=7, created_unix_s=1.5, writer="one")
    page = bytearray(pack_segment(header, KEYS.key_id))
    page[bit // 8] ^= 1 << bit % 8
    try:
        assert parse_segment(bytes(page), KEYS.key_id) == header  # a bit behind it
    except ForeignSegment:
        pass
