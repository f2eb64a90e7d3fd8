"""A ring of shared memory gives what was left there, or nothing."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.shared.errors import Unavailable
from finback.shared.lanes.byte_ring import Left, RingReader, RingWriter
from finback.shared.lanes.mask_ring import leave_mask, take_mask, take_masks
from finback.shared.wire.messages.sampler import Mask, MaskReply

SIZE = 4096


@given(lengths=st.lists(st.integers(0, SIZE // 8 + 2), max_size=40), seed=st.integers(0, 2**32))
def test_what_was_left_comes_back_or_nothing(
    lengths: list[int], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng, folder = random.Random(seed), tmp_path_factory.mktemp("ring")
    writer, reader = RingWriter(folder, SIZE), RingReader(folder)
    reader.meet(writer.name)
    written: list[tuple[bytes, Left]] = []
    for length in lengths:
        data = rng.randbytes(length)
        left = writer.leave(data)
        assert (left is None) == (length > SIZE // 8)
        if left is not None:
            written.append((data, left))
            # The newest is always there.
            assert reader.take(writer.name, left) == data
    for data, left in written:
        assert reader.take(writer.name, left) in (data, None)
    # Whoever is read at once lies there for at least half a ring more.
    recent = written[-3:]
    assert [reader.take(writer.name, left) for _, left in recent] == [data for data, _ in recent]
    writer.close()
    reader.close()


def test_a_place_that_was_overwritten_gives_nothing(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path, SIZE), RingReader(tmp_path)
    reader.meet(writer.name)
    first = writer.leave(b"a" * 500)
    assert first is not None
    for _ in range(SIZE // 500 + 1):
        writer.leave(b"b" * 500)
    assert reader.take(writer.name, first) is None
    assert reader.take(writer.name, Left(SIZE - 1, 500, first.checksum)) is None
    assert reader.take(writer.name, Left(-1, 500, first.checksum)) is None
    writer.close()


def test_rings_of_dead_writers_are_removed_and_others_are_not(tmp_path: Path) -> None:
    alive = RingWriter(tmp_path, SIZE)
    dead = RingWriter(tmp_path, SIZE)
    dead._map.close()
    os.close(dead._fd)  # both, as when its process ends
    other = RingWriter(tmp_path, SIZE)
    assert {path.stem for path in tmp_path.glob("*.ring")} == {alive.name, other.name}
    alive.close()
    other.close()
    assert not tmp_path.exists()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "0123456789abcdef", "0" * 15, "0" * 17])
def test_a_ring_that_is_not_there_is_not_met(name: str, tmp_path: Path) -> None:
    reader = RingReader(tmp_path)
    reader.meet(name)
    assert reader.names == ()
    assert reader.take(name, Left(0, 1, 0)) is None


def test_links_and_empty_files_are_not_opened(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "masks", SIZE)
    (tmp_path / "masks" / f"{'a' * 16}.ring").symlink_to(f"{writer.name}.ring")
    (tmp_path / "masks" / f"{'b' * 16}.ring").touch()
    reader = RingReader(tmp_path / "masks")
    for name in ("a" * 16, "b" * 16, writer.name):
        reader.meet(name)
    assert reader.names == (writer.name,)
    writer.close()


def test_without_a_folder_there_is_no_ring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match="no ring in"):
        RingWriter(tmp_path / "file" / "masks")


def test_a_reader_follows_a_few_rings(tmp_path: Path) -> None:
    writers, reader = [RingWriter(tmp_path, SIZE) for _ in range(6)], RingReader(tmp_path)
    for writer in writers:
        reader.meet(writer.name)
    assert reader.names == tuple(writer.name for writer in writers[-4:])


def test_masks_go_through_a_ring_whole_or_are_asked_for_again(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path, SIZE), RingReader(tmp_path)
    mask = Mask(request_id="r", choice=0, position=3, bitmask=b"\x01" * 96, ahead_masks=b"\x02" * 9)
    reader.meet(writer.name)
    left = leave_mask(writer, mask)
    assert not left.bitmask and not left.ahead_masks
    assert take_mask(reader, writer.name, left) == mask
    asks = Mask(request_id="r", choice=1, position=0, need_from=0)
    assert leave_mask(writer, asks) is asks
    for _ in range(SIZE // 100):
        leave_mask(writer, replace(mask, bitmask=b"\x03" * 96))
    assert take_masks(reader, MaskReply(masks=(left, asks), ring=writer.name)) == (asks,)
    huge = Mask(request_id="r", choice=0, position=3, bitmask=bytes(SIZE))
    assert leave_mask(writer, huge) is huge
