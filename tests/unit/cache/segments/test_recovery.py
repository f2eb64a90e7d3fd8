"""Index and segments that do not fit each other: what can be read again is, nothing else."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from finback.services.cache.segments.disk import Disk
from support.segments import (
    KEY,
    MIB,
    SALT,
    Log,
    block,
    hash_of,
    open_store,
    payload_of,
    read,
    segment_files,
)

NUM_BLOCKS = 60


def _filled(folder: Path) -> None:
    store = open_store(folder, segment_bytes=MIB)
    for number in range(NUM_BLOCKS):
        store.put(*block(number, 50_000, first_block=number, tenant="t", traffic_class="agent"))
    store.close()


def _index(folder: Path) -> Path:
    return folder / "local" / "index.sqlite"


def _lose(index: Path) -> None:
    index.unlink()


def _cut(index: Path) -> None:
    os.truncate(index, index.stat().st_size // 2)


def _scribble(index: Path) -> None:
    data = bytearray(index.read_bytes())
    for at in range(100, len(data), 511):
        data[at] ^= 0xFF
    index.write_bytes(data)


def _replace_with_text(index: Path) -> None:
    index.write_text("this is no database" * 1000)


def _change_schema(index: Path) -> None:
    connection = sqlite3.connect(index)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def _drop_table(index: Path) -> None:
    connection = sqlite3.connect(index)
    connection.execute("DROP TABLE segments")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "damage", [_lose, _cut, _scribble, _replace_with_text, _change_schema, _drop_table]
)
def test_a_damaged_index_is_built_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _filled(tmp_path)
    damage(_index(tmp_path))
    log = Log()
    store = open_store(tmp_path, log=log)
    assert log.has("'num_blocks': 60") or log.has("built again")
    for number in range(NUM_BLOCKS):
        assert read(store, number, 50_000) == payload_of(number, 50_000)
    records = {record.hash: record for record in store.records()}
    assert records[hash_of(7)].first_block == 7
    assert records[hash_of(7)].traffic_class == "agent"
    store.check_integrity()
    store.close()


def test_an_index_damaged_while_it_is_used_is_built_again(tmp_path: Path) -> None:
    log = Log()
    store = open_store(tmp_path, log=log)
    for number in range(NUM_BLOCKS):
        store.put(*block(number, 50_000))
    state = store._state
    state.index.database.run("DROP TABLE blocks")
    assert read(store, 3, 50_000) == payload_of(3, 50_000)
    assert log.has("built again")
    assert store.put(*block(100))
    assert sum(store.lookup(SALT, [hash_of(n) for n in range(NUM_BLOCKS)])) == NUM_BLOCKS
    store.check_integrity()
    store.close()


def test_an_older_index_catches_up(tmp_path: Path) -> None:
    _filled(tmp_path)
    shutil.copy(_index(tmp_path), tmp_path / "old")
    store = open_store(tmp_path)
    for number in range(100, 130):
        store.put(*block(number, 50_000))
    assert store.forget(hashes=[hash_of(5), hash_of(110)]) == 2
    store.put(*block(5, 50_000))  # again, elsewhere
    store.close()
    shutil.move(tmp_path / "old", _index(tmp_path))
    store = open_store(tmp_path)
    expected = [*range(NUM_BLOCKS), *(n for n in range(100, 130) if n != 110)]
    for number in expected:
        assert read(store, number, 50_000) == payload_of(number, 50_000)
    assert read(store, 110, 50_000) == "absent"
    store.check_integrity()
    store.close()


def test_a_newer_index_forgets_what_is_not_there(tmp_path: Path) -> None:
    _filled(tmp_path)
    shutil.copytree(tmp_path / "local", tmp_path / "older")
    store = open_store(tmp_path)
    for number in range(100, 130):
        store.put(*block(number, 50_000))
    store.close()
    shutil.copy(_index(tmp_path), tmp_path / "older" / "index.sqlite")
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "older").rename(tmp_path / "local")
    gone: list[bytes] = []
    store = open_store(tmp_path, on_removed=lambda _, hashes: gone.extend(hashes))
    assert len(gone) == 30
    for number in range(NUM_BLOCKS):
        assert read(store, number, 50_000) == payload_of(number, 50_000)
    assert read(store, 110, 50_000) == "absent"
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("has_index", [True, False])
def test_a_cut_segment_loses_its_end_only(tmp_path: Path, has_index: bool) -> None:
    _filled(tmp_path)
    path = segment_files(tmp_path)[0]
    size = path.stat().st_size
    os.truncate(path, size - 60_000)
    if not has_index:
        _index(tmp_path).unlink()
    store = open_store(tmp_path)
    found = [read(store, number, 50_000) for number in range(NUM_BLOCKS)]
    assert 1 <= found.count("absent") <= 2
    assert all(f in ("absent", payload_of(n, 50_000)) for n, f in enumerate(found))
    store.check_integrity()
    store.close()
    assert path.stat().st_size < size - 60_000  # the torn record is cut off


@pytest.mark.parametrize("encrypt", [True, False])
def test_a_torn_last_record_is_not_served(tmp_path: Path, encrypt: bool) -> None:
    store = open_store(tmp_path, encrypt=encrypt)
    for number in range(3):
        store.put(*block(number, 50_000))
    store.close()
    [path] = segment_files(tmp_path)
    with path.open("r+b") as file:
        # As after a power cut: the header was written, a page of the payload was not.
        file.seek(-8192, os.SEEK_END)
        file.write(bytes(4096))
    _index(tmp_path).unlink()
    store = open_store(tmp_path, encrypt=encrypt)
    assert store.lookup(SALT, [hash_of(n) for n in range(3)]) == [True, True, False]
    assert store.put(*block(2, 50_000))
    assert read(store, 2, 50_000) == payload_of(2, 50_000)
    store.check_integrity()
    store.close()


def test_a_segment_removed_under_a_running_store_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(NUM_BLOCKS):
        store.put(*block(number, 50_000))
    segment_files(tmp_path)[1].unlink()
    found = [read(store, number, 50_000) for number in range(NUM_BLOCKS)]
    assert 0 < found.count("absent") < 30
    again = store.lookup(SALT, [hash_of(n) for n in range(NUM_BLOCKS)])
    assert [not isinstance(f, str) for f in found] == again
    store.sweep()
    store.check_integrity()
    store.close()


def test_a_segment_cut_under_a_running_store_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(NUM_BLOCKS):
        store.put(*block(number, 50_000))
    for path in segment_files(tmp_path):
        os.truncate(path, 10_000)
    assert {read(store, number, 50_000) for number in range(NUM_BLOCKS)} == {"corrupt"}
    assert not any(store.lookup(SALT, [hash_of(n) for n in range(NUM_BLOCKS)]))
    assert store.put(*block(1, 50_000))
    assert read(store, 1, 50_000) == payload_of(1, 50_000)
    store.close()


def _other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x63\x00")


def test_foreign_segments_are_left_alone(tmp_path: Path) -> None:
    _filled(tmp_path)
    before = {path: path.read_bytes() for path in segment_files(tmp_path)}
    log = Log()
    store = open_store(tmp_path, cluster_key=bytes(32), log=log)
    assert list(store.records()) == []
    assert log.has("belongs to the cluster key with id")
    store.put(*block(1))
    store.sweep()
    assert store.forget(everything=True) == 1
    store.close()
    assert {path: path.read_bytes() for path in before} == before
    _other_version(segment_files(tmp_path)[0])
    (tmp_path / "local" / "seg-00000000000000ff.kv").write_bytes(b"something else" * 1000)
    log = Log()
    store = open_store(tmp_path, cluster_key=KEY, log=log)
    assert log.has("format version 99")
    assert log.has("it is no segment")
    assert len(store.stats().ignored) >= 2
    assert 0 < sum(store.lookup(SALT, [hash_of(n) for n in range(NUM_BLOCKS)])) <= NUM_BLOCKS
    store.close()


def test_a_copied_segment_is_not_read_twice(tmp_path: Path) -> None:
    _filled(tmp_path)
    path = segment_files(tmp_path)[0]
    shutil.copy(path, path.with_name("seg-0000000000000001.kv"))
    log = Log()
    store = open_store(tmp_path, log=log)
    assert log.has("under another's name")
    assert sum(store.lookup(SALT, [hash_of(n) for n in range(NUM_BLOCKS)])) == NUM_BLOCKS
    store.check_integrity()
    store.close()


def test_damaged_pins_are_a_line_in_the_log(tmp_path: Path) -> None:
    _filled(tmp_path)
    for text in ("{", "[1]", '{"a": 3}'):
        (tmp_path / "local" / "pins.json").write_text(text)
        log = Log()
        store = open_store(tmp_path, log=log)
        assert store.pins() == {}
        assert log.has("pins cannot be read")
        store.close()


def test_other_writers_are_read_and_never_written(tmp_path: Path) -> None:
    one = open_store(tmp_path, writer="one")
    told: list[bytes] = []
    two = open_store(
        tmp_path,
        writer="two",
        read_others=True,
        on_found=lambda _, hashes: told.extend(hashes),
    )
    for number in range(10):
        one.put(*block(number, 50_000))
    assert not any(two.lookup(SALT, [hash_of(0)]))
    two.sweep()
    assert sorted(told) == sorted(hash_of(number) for number in range(10))
    assert [read(two, n, 50_000) == payload_of(n, 50_000) for n in range(10)] == [True] * 10
    assert not two.put(*block(3, 50_000))  # once for all of them
    two.put(*block(20))
    assert two.stats().others == 10
    assert two.stats().total.num_blocks == 1
    assert two.forget(everything=True) == 11
    assert read(one, 3, 50_000) == payload_of(3, 50_000)
    one.forget(hashes=[hash_of(4)])
    one.put(*block(30))
    two.sweep()
    assert read(two, 30) == payload_of(30)
    one.forget(everything=True)
    assert read(two, 30) == "absent"
    for store in (one, two):
        store.check_integrity()
        store.close()


def test_holes_are_counted_after_a_rebuild(tmp_path: Path) -> None:
    _filled(tmp_path)
    store = open_store(tmp_path)
    store.forget(hashes=[hash_of(n) for n in range(0, NUM_BLOCKS, 2)])
    taken = store.stats().taken_bytes
    store.close()
    _index(tmp_path).unlink()
    store = open_store(tmp_path)
    assert store.stats().taken_bytes == taken
    assert Disk().can_punch
    store.close()
