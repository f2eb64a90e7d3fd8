"""Segments with little left in them are copied out of and removed; readers notice nothing."""

import threading
from pathlib import Path

from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.record import BlockRecord
from support.segments import (
    MIB,
    SALT,
    Clocks,
    aligned,
    block,
    hash_of,
    open_store,
    payload_of,
    read,
    segment_files,
)

SIZE = 50_000


def test_dead_room_is_won_back_where_there_are_no_holes(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks, disk=Disk(punch=False))
    for number in range(100):
        store.put(*block(number, SIZE))
    before = len(segment_files(tmp_path))
    store.forget(hashes=[hash_of(number) for number in range(100) if number % 5])
    assert len(segment_files(tmp_path)) == before
    for _ in range(4):
        clocks.pass_s(5)
        store.sweep()
    assert len(segment_files(tmp_path)) <= 2
    for number in range(100):
        expected = "absent" if number % 5 else payload_of(number, SIZE)
        assert read(store, number, SIZE) == expected
    store.check_integrity()
    store.close()
    (tmp_path / "local" / "index.sqlite").unlink()
    store = open_store(tmp_path)
    assert store.stats().total.num_blocks == 20
    store.close()


def test_the_budget_bounds_what_one_sweep_copies(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(
        tmp_path, clocks=clocks, disk=Disk(punch=False), compact_bytes_s=100_000, encrypt=True
    )
    for number in range(100):
        store.put(*block(number, SIZE))
    store.forget(hashes=[hash_of(number) for number in range(100) if number % 5])
    clocks.pass_s(1)
    moved = []
    for _ in range(12):
        clocks.pass_s(1)
        moved.append(store.sweep().num_moved)
    assert moved[0] <= 4
    assert sum(moved) >= 12
    for number in range(0, 100, 5):
        assert read(store, number, SIZE) == payload_of(number, SIZE)
    store.check_integrity()
    store.close()


def test_small_segments_of_restarts_are_merged(tmp_path: Path) -> None:
    clocks = Clocks()
    for number in range(6):
        store = open_store(tmp_path, clocks=clocks)
        store.put(*block(number))
        store.close()
    assert len(segment_files(tmp_path)) == 6
    store = open_store(tmp_path, clocks=clocks)
    clocks.pass_s(5)
    assert store.sweep().num_moved == 6
    assert len(segment_files(tmp_path)) == 1
    clocks.pass_s(5)
    assert store.sweep().num_moved == 0
    for number in range(6):
        assert read(store, number) == payload_of(number)
    store.close()


def test_a_reader_that_holds_an_old_file_stays_right(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks, disk=Disk(punch=False))
    for number in range(40):
        store.put(*block(number, SIZE))
    numbers = range(0, 40, 5)
    outs = [aligned(53_248) for _ in numbers]
    wrong: list[int] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            found = store.read_many(SALT, [hash_of(number) for number in numbers], outs)
            for number, record, out in zip(numbers, found, outs, strict=True):
                if not isinstance(record, BlockRecord) or out[:SIZE] != payload_of(number, SIZE):
                    wrong.append(number)

    thread = threading.Thread(target=look)
    thread.start()
    for start in range(1, 5):
        store.forget(hashes=[hash_of(number) for number in range(start, 40, 5)])
        for _ in range(3):
            clocks.pass_s(5)
            store.sweep()
    is_over.set()
    thread.join(30)
    assert not thread.is_alive()
    assert wrong == []
    store.close()


def test_a_quota_holds_where_there_are_no_holes(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks, disk=Disk(punch=False), max_bytes=8 * MIB)
    num_stored = 0
    for number in range(600):
        num_stored += store.put(*block(number, SIZE))
        if number % 10 == 9:
            clocks.pass_s(5)
            store.sweep()
        assert sum(path.stat().st_size for path in segment_files(tmp_path)) <= 9 * MIB
    assert num_stored > 550
    assert store.lookup(SALT, [hash_of(0), hash_of(599)]) == [False, True]
    store.check_integrity()
    store.close()
