"""The file tier as its callers see it."""

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.record import BlockRecord, Miss
from finback.services.cache.segments.store import SegmentStore
from finback.shared.errors import ConfigError, InvalidRequest, Unavailable
from support.segments import (
    MIB,
    SALT,
    Clocks,
    Log,
    aligned,
    block,
    hash_of,
    open_store,
    payload_of,
    read,
    segment_files,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"direct": False},
    {"compress": True},
    {"encrypt": True},
    {"compress": True, "encrypt": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_come_back_by_every_way(tmp_path: Path, options: dict[str, Any]) -> None:
    store = open_store(tmp_path, **options)
    sizes = {number: 1 + number * 3001 for number in range(40)} | {50: 4096, 51: 8192}
    for number, size in sizes.items():
        assert store.put(*block(number, size, tenant="a", first_block=number))
    outs = [aligned(MIB) for _ in sizes]
    outs[3], outs[4] = memoryview(bytearray(MIB))[1:], memoryview(bytearray(sizes[4]))
    found = store.read_many(SALT, [hash_of(number) for number in sizes], outs)
    for (number, size), record, out in zip(sizes.items(), found, outs, strict=True):
        assert isinstance(record, BlockRecord)
        assert record == block(number, size, tenant="a", first_block=number)[0]
        assert out[:size] == payload_of(number, size)
    store.check_integrity()
    store.close()


def test_compressible_payloads_take_less(tmp_path: Path) -> None:
    store = open_store(tmp_path, compress=True)
    record, _ = block(1, 100_000)
    zeros = bytes(100_000)
    assert store.put(replace(record, checksum=xxhash.xxh3_128_digest(zeros)), zeros)
    assert store.stats().total.num_bytes <= 3 * 4096
    out = aligned(100_352)
    store.read_into(SALT, hash_of(1), out)
    assert out[:100_000] == zeros
    store.close()


def test_an_encrypted_store_shows_neither_payload_nor_checksum(tmp_path: Path) -> None:
    store = open_store(tmp_path, encrypt=True)
    record, payload = block(1)
    assert store.put(record, payload)
    assert [found.checksum for found in store.records()] == [b""]
    store.close()
    data = b"".join(path.read_bytes() for path in (tmp_path / "local").iterdir())
    assert payload[100:116] not in data
    assert record.checksum not in data
    store = open_store(tmp_path, encrypt=True)
    out = aligned(12_288)
    assert store.read_into(SALT, hash_of(1), out).checksum == record.checksum
    store.close()


def test_encryption_needs_a_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cluster key"):
        open_store(tmp_path, encrypt=True, cluster_key=b"")
    open_store(tmp_path, cluster_key=b"").close()


def test_a_block_is_stored_once_and_a_later_end_counts(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks)
    assert store.put(*block(1, expires_unix_s=clocks.unix_s + 10))
    assert not store.put(*block(1, expires_unix_s=clocks.unix_s + 100))
    assert not store.put(*block(1, expires_unix_s=clocks.unix_s + 5))
    assert store.stats().counts["refused.duplicate"] == 2
    clocks.pass_s(50)
    assert store.lookup(SALT, [hash_of(1), hash_of(2)]) == [True, False]
    assert store.lookup("another", [hash_of(1)]) == [False]
    clocks.pass_s(50)
    assert store.lookup(SALT, [hash_of(1)]) == [False]
    assert read(store, 1) == "expired"
    store.close()


def test_files_are_private(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new" / "tier")
    store.put(*block(1))
    store.pin("p", SALT, [hash_of(1)])
    store.sweep()
    for path in (tmp_path / "new" / "tier" / "local").iterdir():
        mode = stat.S_IMODE(os.stat(path).st_mode)
        assert mode & 0o077 == 0, path
    store.close()


def test_what_cannot_be_kept_is_refused_by_field(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    record, payload = block(1)
    for field, value in (
        ("kind", "state"),
        ("hash", b"short"),
        ("checksum", b""),
        ("length", 1),
        ("salt", ""),
        ("salt", "s" * 200),
        ("tenant", "t" * 300),
        ("first_block", -1),
    ):
        with pytest.raises(InvalidRequest) as caught:
            store.put(replace(record, **{field: value}), payload)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.param == field
    with pytest.raises(InvalidRequest, match="buffers"):
        store.read_many(SALT, [hash_of(1)], [])
    store.put(record, payload)
    with pytest.raises(InvalidRequest, match="8000 bytes"):
        store.read_into(SALT, hash_of(1), aligned(8000))
    with pytest.raises(InvalidRequest, match="writable"):
        store.read_into(SALT, hash_of(1), memoryview(bytes(9000)))
    store.close()
    with pytest.raises(Unavailable):
        store.put(record, payload)
    with pytest.raises(ConfigError, match="writer"):
        open_store(tmp_path, writer="../x")
    with pytest.raises(ConfigError, match="max_bytes"):
        open_store(tmp_path, max_bytes=1)


def test_a_payload_that_differs_from_its_checksum_is_not_stored(tmp_path: Path) -> None:
    log = Log()
    store = open_store(tmp_path, log=log)
    record, payload = block(1)
    assert not store.put(record, payload[:-1] + b"x")
    assert store.stats().counts["refused.mismatch"] == 1
    assert log.has("does not fit its checksum")
    assert read(store, 1) == "absent"
    store.close()


def test_forgetting_wipes_the_bytes_and_lasts(tmp_path: Path) -> None:
    gone: list[bytes] = []
    store = open_store(tmp_path, on_removed=lambda _, hashes: gone.extend(hashes))
    for number in range(30):
        store.put(*block(number, tenant=f"tenant-{number % 3}"))
    store.pin("kept", SALT, [hash_of(1)])
    assert store.forget(tenant="tenant-1") == 10
    assert store.forget(salt=SALT, hashes=[hash_of(2), hash_of(99)]) == 1
    assert sorted(gone) == sorted(hash_of(number) for number in (*range(1, 30, 3), 2))
    data = b"".join(path.read_bytes() for path in segment_files(tmp_path))
    assert payload_of(0)[1000:1016] in data
    assert not any(payload_of(number)[1000:1016] in data for number in (1, 2, 4, 28))
    store.close()
    (tmp_path / "local" / "index.sqlite").unlink()
    store = open_store(tmp_path)
    assert store.stats().by_tenant.keys() == {"tenant-0", "tenant-2"}
    assert store.stats().total.num_blocks == 19
    assert store.forget(everything=True) == 19
    assert list(store.records()) == []
    with pytest.raises(InvalidRequest):
        store.forget()
    with pytest.raises(InvalidRequest):
        store.forget(tenant="a", everything=True)
    store.close()


def test_where_there_are_no_holes_forgetting_writes_zeros(tmp_path: Path) -> None:
    store = open_store(tmp_path, disk=Disk(punch=False))
    store.put(*block(1, 2_500_000))
    store.put(*block(2))
    assert store.forget(hashes=[hash_of(1)]) == 1
    data = b"".join(path.read_bytes() for path in segment_files(tmp_path))
    payload = payload_of(1, 2_500_000)
    assert not any(payload[at : at + 16] in data for at in (0, 1_000_000, 2_499_000))
    assert read(store, 2) == payload_of(2)
    store.close()


def _fill(store: SegmentStore, traffic_class: str, numbers: range, clocks: Clocks) -> int:
    done = 0
    for number in numbers:
        clocks.pass_s(1)
        done += store.put(*block(number, 100_000, traffic_class=traffic_class))
    return done


def test_the_quota_evicts_by_class_then_age_and_never_what_is_pinned(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, max_bytes=4 * MIB, clocks=clocks)
    store.pin("pinned", SALT, [hash_of(0)])
    assert _fill(store, "batch", range(10), clocks) == 10
    assert _fill(store, "agent", range(10, 20), clocks) == 10
    assert _fill(store, "chat", range(20, 43), clocks) == 23
    assert store.stats().taken_bytes <= 4 * MIB
    kept = [store.lookup(SALT, [hash_of(number)])[0] for number in range(43)]
    assert kept[0]  # pinned
    assert all(kept[10:20])  # agent: evicted last
    assert all(kept[20:])
    assert 0 < sum(kept[1:10]) < 9
    # A batch block does not push out what is worth more.
    assert _fill(store, "batch", range(100, 140), clocks) > 0
    assert all(store.lookup(SALT, [hash_of(number) for number in range(10, 43)]))
    store.sweep()
    assert store.stats().taken_bytes <= 4 * MIB - 4 * MIB // 10
    store.check_integrity()
    store.close()


def test_a_tenant_has_a_quota_of_its_own(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, tenant_bytes=500_000, clocks=clocks)
    for number in range(20):
        clocks.pass_s(1)
        assert store.put(*block(number, 100_000, tenant="greedy"))
        assert number > 3 or store.put(*block(100 + number, 50_000, tenant="modest"))
    assert store.stats().by_tenant["greedy"].num_bytes <= 500_000
    assert store.stats().by_tenant["modest"].num_blocks == 4
    assert store.lookup(SALT, [hash_of(0), hash_of(19)]) == [False, True]
    assert not store.put(*block(200, 600_000, tenant="greedy"))
    store.close()


def test_use_protects_from_eviction(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, max_bytes=2 * MIB, clocks=clocks)
    _fill(store, "chat", range(15), clocks)
    clocks.pass_s(1)
    store.touch(SALT, [hash_of(0)])
    read(store, 1, 100_000)
    store.sweep()
    _fill(store, "chat", range(20, 32), clocks)
    assert store.lookup(SALT, [hash_of(number) for number in (0, 1, 2, 3)]) == [
        True,
        True,
        False,
        False,
    ]
    store.close()


def test_pins_last_and_do_not_expire(tmp_path: Path) -> None:
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks)
    store.put(*block(1, expires_unix_s=clocks.unix_s + 10))
    store.pin("system prompt", SALT, [hash_of(1), hash_of(2)])
    clocks.pass_s(100)
    store.sweep()
    store.close()
    (tmp_path / "local" / "index.sqlite").unlink()
    store = open_store(tmp_path, clocks=clocks)
    assert store.pins() == {"system prompt": (SALT, (hash_of(1), hash_of(2)))}
    assert read(store, 1) == payload_of(1)
    assert store.unpin("system prompt")
    assert not store.unpin("system prompt")
    assert read(store, 1) == "expired"
    assert store.sweep().num_expired == 1
    for name in ("", "a\nb", "x" * 300):
        with pytest.raises(InvalidRequest, match="name"):
            store.pin(name, SALT, [hash_of(1)])
    store.close()


def test_a_clock_that_jumps_does_not_empty_the_store(tmp_path: Path) -> None:
    clocks, log = Clocks(), Log()
    store = open_store(tmp_path, clocks=clocks, log=log)
    for number in range(20):
        store.put(*block(number, expires_unix_s=clocks.unix_s + 86_400))
    clocks.unix_s += 30 * 86_400
    assert store.sweep().num_expired == 0
    assert all(store.lookup(SALT, [hash_of(number) for number in range(20)]))
    assert log.has("clock jumped")
    clocks.unix_s -= 30 * 86_400  # set right again
    clocks.pass_s(3700)
    store.sweep()
    assert all(store.lookup(SALT, [hash_of(number) for number in range(20)]))
    store.close()
    clocks.unix_s += 30 * 86_400  # while it was closed
    store = open_store(tmp_path, clocks=clocks)
    assert store.sweep().num_expired == 0
    clocks.pass_s(3700)
    store.sweep()
    assert store.sweep().num_expired == 20 or not any(
        store.lookup(SALT, [hash_of(number) for number in range(20)])
    )
    store.close()


def test_records_and_stats_tell_what_is_there(tmp_path: Path) -> None:
    counted: list[tuple[str, float, dict[str, str]]] = []

    def count(name: str, amount: float = 1, /, **labels: str) -> None:
        counted.append((name, amount, labels))

    store = open_store(tmp_path, count=count)
    for number in range(1500):
        store.put(*block(number, 100, tenant=str(number % 2), traffic_class="agent"))
    assert {record.hash for record in store.records()} == {hash_of(n) for n in range(1500)}
    stats = store.stats()
    assert stats.by_class["agent"].num_blocks == 1500
    assert stats.by_tenant["0"].num_blocks == 750
    assert stats.by_salt[SALT].num_bytes == 1500 * 8192
    read(store, 1, 100)
    read(store, 9999, 100)
    assert ("finback.cache.files_misses", 1, {"reason": "absent"}) in counted
    assert ("finback.cache.files_hits", 1, {}) in counted
    store.close()


def test_find_tells_the_length_before_reading(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(*block(1, 777))
    [found, missing] = store.find(SALT, [hash_of(1), hash_of(2)])
    assert found is not None
    assert (found.length, missing) == (777, None)
    with pytest.raises(Miss):
        store.read_into(SALT, hash_of(2), aligned(4096))
    store.close()


def test_a_read_begins_a_block_s_time_anew(tmp_path: Path) -> None:
    """In steps of a flush; what nobody reads ends when it was to end, and a wrong clock adds nothing."""
    clocks = Clocks()
    store = open_store(tmp_path, clocks=clocks)
    for number in (1, 2, 3):
        record, payload = block(number, expires_unix_s=clocks.unix_s + 100)
        store.put(replace(record, used_unix_s=clocks.unix_s), payload)
    for _ in range(4):
        clocks.pass_s(60)
        assert read(store, 1) == payload_of(1)
        store.sweep()
    clocks.pass_s(60)
    store.touch(SALT, [hash_of(1)])
    store.close()
    store = open_store(tmp_path, clocks=clocks)
    assert read(store, 2) == read(store, 3) == "absent"
    assert read(store, 1) == payload_of(1)
    clocks.pass_s(99)
    assert read(store, 1) == payload_of(1)
    clocks.pass_s(101)
    assert read(store, 1) == "expired"
    store.close()
