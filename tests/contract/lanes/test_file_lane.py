"""Lane `file`: what only it must do, beside what every lane must."""

import dataclasses
import os
import stat
from pathlib import Path

import pytest

from finback.shared.errors import ConfigError, Overloaded, Unavailable
from finback.shared.lanes import direct_read
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.file_lane import DEAD_S, FileLane, Sweeper


async def opened(folder: Path, owner: str = "prefill-a", **options: int) -> FileLane:
    lane = FileLane(folder, owner, 7, **options)
    await lane.start()
    return lane


async def test_files_are_private_and_go_with_their_ticket(tmp_path: Path) -> None:
    lane = await opened(tmp_path / "lanes")
    data = os.urandom(100_001)
    ticket = await lane.put(data)
    path = tmp_path / "lanes" / ticket.location
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert bytes(await lane.get(ticket)) == data
    await lane.release(ticket)
    assert not path.exists()
    with pytest.raises(CorruptData, match="gone"):
        await lane.get(ticket)
    kept = await lane.put(data)
    await lane.close()
    assert not (tmp_path / "lanes" / kept.location).parent.exists()


async def test_the_probe_tells_who_sees_the_same_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    writer = await opened(here)
    assert await FileLane(here).can_read(writer.address)
    assert not await FileLane(there).can_read(writer.address)
    twin = await opened(there)  # an equal name elsewhere, as on a host with a folder of that path
    assert not await FileLane(there).can_read(writer.address)
    for address in ("", "x", ":", "prefill-a.7:", "../etc.7:abc", writer.address[:-1]):
        assert not await FileLane(here).can_read(address), address
    await writer.close()
    await twin.close()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("size", [1, 4096, (1 << 20) + 1, 3_000_000])
async def test_reads_around_the_cache_or_not(
    size: int, is_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct:
        plain = lambda path: (os.open(path, os.O_RDONLY), False)
        monkeypatch.setattr(direct_read, "_open", plain)
    lane = await opened(tmp_path)
    data = os.urandom(size)
    ticket = await lane.put(data)
    assert bytes(await lane.get(ticket)) == data
    path = tmp_path / ticket.location
    flipped = bytearray(data)
    flipped[-1] ^= 1
    for wrong, reason in ((flipped, "checksum"), (data[:-1], "length"), (data + b"x", "length")):
        path.write_bytes(wrong)
        with pytest.raises(CorruptData, match=reason):
            await lane.get(ticket)
    await lane.close()


async def test_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    lane = await opened(tmp_path / "lanes")
    ticket = await lane.put(b"abc")
    (tmp_path / "secret").write_bytes(b"abc")
    link = tmp_path / "lanes" / "prefill-a.7" / ("0" * 32)
    link.symlink_to(tmp_path / "secret")
    for location in (
        "../secret",
        "prefill-a.7/../../secret",
        "/etc/passwd",
        f"prefill-a.7/{'0' * 32}",
    ):
        with pytest.raises(CorruptData):
            await lane.get(dataclasses.replace(ticket, location=location))
    await lane.close()


async def test_a_full_or_absent_folder_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = await opened(tmp_path, max_offered_bytes=1000)
    with pytest.raises(Overloaded):
        await lane.put(bytes(1001))

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("finback.shared.lanes.file_lane.os.write", full)
        with pytest.raises(Unavailable, match="No space"):
            await lane.put(b"x")
    assert lane.num_offered_bytes == 0
    assert sorted(p.name for p in (tmp_path / "prefill-a.7").iterdir()) == ["alive", "nonce"]
    await lane.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="lane_dir"):
        await opened(tmp_path / "file")


async def test_only_what_dead_writers_left_is_swept(tmp_path: Path) -> None:
    living, dead = await opened(tmp_path, "prefill-a"), await opened(tmp_path, "prefill-b")
    await dead.put(b"left behind")
    (tmp_path / "somebody else's").mkdir()
    sweeper = Sweeper(tmp_path)
    assert sweeper.sweep(0.0) == []
    os.utime(
        tmp_path / "prefill-a.7" / "alive", (1e9, 1e9)
    )  # even a clock set back is a sign of life
    assert sweeper.sweep(DEAD_S + 1) == ["prefill-b.7"]
    assert sweeper.sweep(DEAD_S + 2) == []
    assert sorted(os.listdir(tmp_path)) == ["prefill-a.7", "somebody else's"]
    await living.close()
