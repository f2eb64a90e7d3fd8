"""The arena's bytes: what is written is read, and what makes no sense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.lanes.arena_format import (
    PAGE,
    READABLE,
    SLOT_HEADER_BYTES,
    BlockKind,
    BlockLabel,
    ExtentHeader,
    SlotHeader,
    SlotState,
    TrafficClass,
    pack_extent,
    parse_extent,
    plan_extent,
    read_head,
    read_slot,
    table_offset,
    write_slot,
)

LABELS = st.builds(
    BlockLabel,
    salt=st.from_regex(r"\A[a-z0-9:-]{1,64}\Z"),
    hash=st.binary(min_size=32, max_size=32),
    kind=st.sampled_from(BlockKind),
    block_index=st.integers(0, 2**32 - 1),
    tenant=st.binary(min_size=16, max_size=16),
    traffic_class=st.sampled_from(TrafficClass),
    retention_s=st.integers(0, 2**32 - 1),
)
HEADERS = st.builds(
    SlotHeader,
    state=st.sampled_from(SlotState),
    generation=st.integers(0, 2**64 - 1),
    owner=st.from_regex(r"\A[a-z0-9-]{0,64}\Z"),
    owner_epoch=st.integers(0, 2**64 - 1),
    lease_id=st.binary(min_size=16, max_size=16).filter(any).map(bytes.hex),
    lease_ms=st.integers(0, 60_000),
    length=st.integers(0, 2**40),
    checksum=st.binary(min_size=16, max_size=16).filter(any),
    label=st.none() | LABELS,
    expiry_s=st.floats(0, 1e12),
    used_s=st.floats(0, 1e12),
    is_pinned=st.booleans(),
)


@given(st.lists(HEADERS, min_size=1, max_size=4))
def test_slot_headers_come_back(headers: list[SlotHeader]) -> None:
    table = memoryview(bytearray(table_offset(4)))
    for index, header in enumerate(headers):
        write_slot(table, index, header)
    assert [read_slot(table, index, is_sealed=True) for index in range(len(headers))] == headers
    heads = [(header.state, header.generation) for header in headers]
    assert [read_head(table, index) for index in range(len(headers))] == heads


@given(
    header=HEADERS.filter(lambda header: header.state in READABLE and header.label), at=st.data()
)
def test_a_flipped_bit_in_what_a_block_is_named_by_breaks_the_seal(
    header: SlotHeader, at: st.DataObject
) -> None:
    table = memoryview(bytearray(table_offset(1)))
    write_slot(table, 0, header)
    bit = at.draw(st.integers(0, 8 * SLOT_HEADER_BYTES - 1))
    table[table_offset(0) + bit // 8] ^= 1 << bit % 8
    try:
        found = read_slot(table, 0, is_sealed=True)
    except ValueError:
        return
    if found.state in READABLE:
        assert _fixed(found) == _fixed(header)


def _fixed(header: SlotHeader) -> tuple[object, ...]:
    label = header.label
    assert label is not None
    name = (label.salt, label.kind, label.hash, label.tenant, label.block_index)
    return (*name, header.generation, header.length, header.checksum)


@given(
    slot_bytes=st.integers(1, 200).map(lambda pages: pages * PAGE),
    file_bytes=st.integers(0, 1 << 22),
)
def test_planned_extents_fit_and_parse(slot_bytes: int, file_bytes: int) -> None:
    header = plan_extent(7, slot_bytes, file_bytes)
    if header is None:
        assert file_bytes < 2 * PAGE + slot_bytes
        return
    assert header.file_bytes <= file_bytes
    assert header.data_offset % PAGE == 0
    assert header.data_offset >= table_offset(header.num_slots)
    assert parse_extent(pack_extent(header), header.file_bytes) == header
    for index in (0, header.num_slots - 1):
        assert header.slot_index(header.slot_offset(index)) == index


@pytest.mark.parametrize("offset", [0, PAGE, 2 * PAGE + 1, 4 * PAGE])
def test_offsets_between_slots_are_refused(offset: int) -> None:
    header = ExtentHeader(extent_id=1, slot_bytes=PAGE, num_slots=2, data_offset=2 * PAGE)
    with pytest.raises(ValueError, match="no slot"):
        header.slot_index(offset)


def test_a_foreign_or_truncated_file_is_refused() -> None:
    header = plan_extent(7, PAGE, 1 << 16)
    assert header is not None
    packed = pack_extent(header)
    for head, size in ((b"", 0), (b"x" * 64, 1 << 16), (packed, header.file_bytes - 1)):
        with pytest.raises(ValueError, match=r"."):
            parse_extent(head, size)


@given(state=st.sampled_from(SlotState), header=HEADERS, stop=st.integers(0, 10))
def test_a_kill_between_two_writes_leaves_the_old_state_or_the_new(
    state: SlotState, header: SlotHeader, stop: int
) -> None:
    class Killed(Exception):
        pass

    class Table:
        """Lets `stop` assignments through, as a process that is killed then."""

        def __init__(self, inner: memoryview) -> None:
            self.inner, self.left = inner, stop

        def __setitem__(self, key: int | slice, value: int | bytes) -> None:
            if self.left == 0:
                raise Killed
            self.left -= 1
            self.inner[key] = value  # type: ignore[index, assignment]  # int with int, slice with bytes

    inner = memoryview(bytearray(table_offset(1)))
    write_slot(inner, 0, SlotHeader(state=state, lease_id="01" * 16, owner="a"))
    try:
        write_slot(Table(inner), 0, header)  # type: ignore[arg-type]  # only assigned to
    except Killed:
        pass
    assert read_slot(inner, 0).state in (state, header.state)
    if read_slot(inner, 0).state is header.state is SlotState.RESERVED is not state:
        assert read_slot(inner, 0) == header
