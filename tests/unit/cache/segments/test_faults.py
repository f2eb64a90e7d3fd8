"""Disks that are full, read-only or failing; two who want one folder; races."""

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from finback.services.cache.segments.disk import Disk
from finback.shared.errors import ConfigError, Unavailable
from support.segments import (
    MIB,
    SALT,
    Clocks,
    Log,
    block,
    hash_of,
    open_store,
    payload_of,
    read,
)

SIZE = 50_000


class FailingDisk(Disk):
    """Fails when it is told to, as a bad device does."""

    def __init__(self, code: int = errno.EIO) -> None:
        super().__init__()
        self.fails: set[str] = set()
        self._code = code

    def _check(self, what: str) -> None:
        if what in self.fails:
            raise OSError(self._code, os.strerror(self._code))

    def read(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self._check("read")
        return super().read(fd, views, offset)

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        if "half" in self.fails:
            super().write(fd, view[:8192], offset)
            raise OSError(self._code, os.strerror(self._code))
        self._check("write")
        super().write(fd, view, offset)

    def sync(self, fd: int) -> None:
        self._check("sync")
        super().sync(fd)

    def punch(self, fd: int, offset: int, length: int) -> bool:
        self._check("punch")
        return super().punch(fd, offset, length)


@contextlib.contextmanager
def _mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system of its own, where that may be had."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_and_goes_on(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "size=4m") as folder:
        clocks, log = Clocks(), Log()
        store = open_store(folder, clocks=clocks, log=log)
        stored = [store.put(*block(number, SIZE)) for number in range(120)]
        assert 20 < sum(stored) < 80
        assert log.has("disk is full")
        assert store.stats().counts["refused.disk_full"] >= 1
        assert store.stats().counts["refused.backing_off"] >= 1
        assert sum("disk is full" in event for _, event, _ in log.lines) == 1
        for number, is_stored in enumerate(stored):
            expected = payload_of(number, SIZE) if is_stored else "absent"
            assert read(store, number, SIZE) == expected
        store.sweep()
        store.forget(hashes=[hash_of(number) for number in range(40)])
        clocks.pass_s(10)
        assert store.put(*block(500, SIZE))
        store.check_integrity()
        store.close()
        store = open_store(folder)
        assert read(store, 500, SIZE) == payload_of(500, SIZE)
        store.check_integrity()
        store.close()


def test_a_store_opens_on_a_full_disk_and_makes_room(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "size=4m") as folder:
        clocks, log = Clocks(), Log()
        store = open_store(folder, clocks=clocks, log=log)
        for number in range(30):
            store.put(*block(number, SIZE, expires_unix_s=clocks.unix_s + 100))
        store.close()
        for path in folder.glob("local/*"):
            if not path.name.startswith("seg-"):
                path.unlink()
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        store = open_store(folder, clocks=clocks, log=log)
        assert read(store, 3, SIZE) == payload_of(3, SIZE)
        assert not store.put(*block(100, 2 * SIZE))
        clocks.pass_s(200)
        assert store.sweep().num_expired == 30
        assert store.put(*block(100, 2 * SIZE))
        store.sweep()
        store.check_integrity()
        store.close()
        store = open_store(folder, clocks=clocks)
        assert read(store, 100, 2 * SIZE) == payload_of(100, 2 * SIZE)
        store.close()


def test_an_index_that_has_no_room_moves_to_memory(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "size=3m") as folder:
        log = Log()
        store = open_store(folder, log=log)
        for number in range(20):
            store.put(*block(number, SIZE))
        with contextlib.suppress(OSError), open(folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for number in range(20):
            store.touch(SALT, [hash_of(number)])
        for _ in range(3):
            store.sweep()
        assert not store.stats().is_index_lasting
        assert log.has("kept in memory")
        for number in range(20):
            assert read(store, number, SIZE) == payload_of(number, SIZE)
        store.close()
        (folder / "filler").unlink()
        store = open_store(folder)
        for number in range(20):
            assert read(store, number, SIZE) == payload_of(number, SIZE)
        store.check_integrity()
        store.close()


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    with _mounted(tmp_path / "small", "size=8m") as folder:
        store = open_store(folder)
        store.put(*block(1))
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        log = Log()
        store = open_store(folder, log=log)
        assert log.has("only read")
        assert store.stats().is_read_only
        assert read(store, 1) == payload_of(1)
        assert not store.put(*block(2))
        assert store.stats().counts["refused.read_only"] == 1
        store.sweep()
        with pytest.raises(Unavailable, match="cannot be written"):
            store.forget(everything=True)
        with pytest.raises(Unavailable, match="pins"):
            store.pin("p", SALT, [hash_of(1)])
        store.close()


def test_a_disk_that_turns_read_only_costs_puts_only(tmp_path: Path) -> None:
    # Real file systems do so after an error; one in use cannot be remounted like that.
    disk, log = FailingDisk(errno.EROFS), Log()
    store = open_store(tmp_path, disk=disk, log=log)
    store.put(*block(1, SIZE))
    disk.fails = {"write", "punch", "sync"}
    assert not store.put(*block(2, SIZE))
    assert log.has("Read-only file system")
    store.sweep()
    assert read(store, 1, SIZE) == payload_of(1, SIZE)
    store.close()
    store = open_store(tmp_path)
    assert read(store, 1, SIZE) == payload_of(1, SIZE)
    store.close()


def test_a_folder_that_cannot_be_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use file tier"):
        open_store(tmp_path / "file" / "tier")


def test_reads_that_fail_are_misses_and_three_let_the_block_go(tmp_path: Path) -> None:
    disk, log = FailingDisk(), Log()
    store = open_store(tmp_path, disk=disk, log=log)
    store.put(*block(1))
    disk.fails = {"read"}
    assert [read(store, 1) for _ in range(2)] == ["io", "io"]
    disk.fails = set()
    assert read(store, 1) == payload_of(1)  # it was a hiccup
    disk.fails = {"read"}
    assert read(store, 1) == "io"
    assert read(store, 1) == "absent"
    assert log.has("cannot read") and log.has("let go")
    assert store.stats().counts["misses.io"] == 3
    disk.fails = set()
    assert store.put(*block(1))
    assert read(store, 1) == payload_of(1)
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("fault", ["write", "half"])
def test_writes_that_fail_lose_nothing_else(tmp_path: Path, fault: str) -> None:
    clocks, disk, log = Clocks(), FailingDisk(), Log()
    store = open_store(tmp_path, clocks=clocks, disk=disk, log=log)
    store.put(*block(1, SIZE))
    disk.fails = {fault}
    assert not store.put(*block(2, SIZE))
    assert log.has("cannot write")
    disk.fails = set()
    assert not store.put(*block(2, SIZE))  # it waits a little
    clocks.pass_s(6)
    assert store.put(*block(2, SIZE))
    for number in (1, 2):
        assert read(store, number, SIZE) == payload_of(number, SIZE)
    store.check_integrity()
    store.close()
    (tmp_path / "local" / "index.sqlite").unlink()
    store = open_store(tmp_path)
    for number in (1, 2):
        assert read(store, number, SIZE) == payload_of(number, SIZE)
    store.close()


@pytest.mark.parametrize("fault", ["write", "punch", "sync"])
def test_forgetting_that_fails_says_so_and_can_be_repeated(tmp_path: Path, fault: str) -> None:
    disk = FailingDisk()
    store = open_store(tmp_path, disk=disk)
    store.put(*block(1, SIZE))
    disk.fails = {fault}
    with pytest.raises(Unavailable, match="cannot forget"):
        store.forget(everything=True)
    disk.fails = set()
    assert store.forget(everything=True) == 1
    assert read(store, 1, SIZE) == "absent"
    store.close()


def test_upkeep_that_fails_is_logged_and_tried_again(tmp_path: Path) -> None:
    clocks, disk, log = Clocks(), FailingDisk(), Log()
    store = open_store(tmp_path, clocks=clocks, disk=disk, log=log)
    store.put(*block(1, expires_unix_s=clocks.unix_s + 1))
    clocks.pass_s(2)
    disk.fails = {"write", "sync"}
    assert store.sweep().num_expired == 0
    assert log.has("upkeep failed")
    disk.fails = set()
    assert store.sweep().num_expired == 1
    store.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on .* writes to"):
        open_store(tmp_path)
    program = (
        "from finback.services.cache.segments.store import SegmentStore\n"
        f"SegmentStore({str(tmp_path)!r}, max_bytes=2**20, cluster_key=b'').open()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "ConfigError: another process" in done.stderr
    other = open_store(tmp_path, writer="other")
    other.close()
    store.close()
    open_store(tmp_path).close()


def test_another_hosts_fresh_lease_is_respected(tmp_path: Path) -> None:
    clocks = Clocks()
    open_store(tmp_path, clocks=clocks).close()
    lease = '{"host": "far away", "pid": 1, "nonce": "x", "renewed_unix_s": %f}'
    (tmp_path / "local" / "lock").write_text(lease % (clocks.unix_s - 10))
    with pytest.raises(ConfigError, match="far away"):
        open_store(tmp_path, clocks=clocks)
    clocks.pass_s(120)
    log = Log()
    store = open_store(tmp_path, clocks=clocks, log=log)
    store.put(*block(1))
    (tmp_path / "local" / "lock").write_text(lease % clocks.unix_s)
    store.sweep()
    assert log.has("took the folder over")
    assert not store.put(*block(2))
    assert read(store, 1) == payload_of(1)
    store.close()


def test_puts_racing_with_forgetting_reading_and_sweeping(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=8 * MIB)
    wrong: list[str] = []
    is_over = threading.Event()

    def forget() -> None:
        while not is_over.wait(0.002):
            store.forget(hashes=[hash_of(number) for number in range(0, 20, 3)])

    def look(numbers: Sequence[int]) -> None:
        while not is_over.is_set():
            for number in numbers:
                found = read(store, number, SIZE)
                if found not in ("absent", payloads[number]):
                    wrong.append(f"{number}: {str(found)[:20]}")

    def sweep() -> None:
        while not is_over.wait(0.005):
            store.sweep()

    payloads = {number: payload_of(number, SIZE) for number in range(20)}
    threads = [
        threading.Thread(target=forget),
        threading.Thread(target=look, args=(range(20),)),
        threading.Thread(target=look, args=(range(19, -1, -1),)),
        threading.Thread(target=sweep),
    ]
    for thread in threads:
        thread.start()
    num_stored = 0
    for _ in range(40):
        for number in range(20):
            num_stored += store.put(*block(number, SIZE))
    is_over.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    assert num_stored >= 20
    # Each was either forgotten or is there; nothing came back.
    store.forget(hashes=[hash_of(0)])
    assert read(store, 0, SIZE) == "absent"
    assert "removed.corrupt" not in store.stats().counts
    store.check_integrity()
    store.close()
