"""Export and import through a cache service: from one folder only, and bad files are refused clearly."""

import os
from pathlib import Path

import pytest

from finback.services.cache.admin_endpoints import OPERATOR
from finback.services.cache.segments.exchange_format import PrefixHead, write_block, write_head
from finback.services.supervisor import nats_config
from finback.shared.errors import InvalidRequest, NotFound, PermissionDenied
from finback.shared.wire.messages.cache_admin import (
    ExchangeReply,
    ExportRequest,
    ImportRequest,
    StatsReply,
    StatsRequest,
)
from support.cache_asker import Asker, open_asker
from support.cache_files import files, keep_in_files, ready
from support.kv_store import SALT, joined

KEY = "5b" * 32
BLOCK_TOKENS = 8


async def export(asker: Asker, path: str, names: str = "ab") -> ExchangeReply:
    asked = ExportRequest(path=path, salt=SALT, hashes=joined(names), block_size=BLOCK_TOKENS)
    return await asker.ask("export", asked, ExchangeReply)


async def take_in(asker: Asker, path: str) -> ExchangeReply:
    return await asker.ask("import", ImportRequest(path=path), ExchangeReply)


async def test_out_and_in_again(tmp_path: Path) -> None:
    async with open_asker(tmp_path, **files(tmp_path, cluster_key=KEY)) as asker:
        await keep_in_files(asker, ["a"])
        await keep_in_files(asker, ["b"], first_block=1)
        told = await export(asker, "prefix.kv")
        path = tmp_path / "exchange" / "prefix.kv"
        assert told.num_blocks == 2
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        with pytest.raises(InvalidRequest, match="File exists"):
            await export(asker, str(path))
        told = await take_in(asker, str(path))
        assert (told.num_blocks, told.salt, len(told.hashes)) == (2, SALT, 64)
        with pytest.raises(NotFound):
            await export(asker, "none.kv", "z")
        assert not (path.parent / "none.kv").exists()
        assert not asker.service._tier.health.is_failed


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../s/pins.json",
        "sub/prefix.kv",
        ".hidden",
        "",
        "a" * 129,
        "nul\0",
        "{folder}/../escape",
    ],
)
async def test_no_other_place_is_written_or_read(tmp_path: Path, path: str) -> None:
    async with open_asker(tmp_path, **files(tmp_path, cluster_key=KEY)) as asker:
        await keep_in_files(asker, ["a"])
        given = path.format(folder=tmp_path / "exchange")
        for act in (export, take_in):
            with pytest.raises(InvalidRequest, match="cache_exchange_dir"):
                await act(asker, given)
        assert not (tmp_path / "escape").exists()


async def test_links_and_folders_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (tmp_path / "secret").write_text("nothing to import")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    more = files(tmp_path, cluster_key=KEY, cache_exchange_dir=str(folder))
    async with open_asker(tmp_path, **more) as asker:
        await keep_in_files(asker, ["a"])
        for name in ("link", "folder", "pipe", "missing"):
            with pytest.raises(InvalidRequest) as caught:
                await take_in(asker, name)
            assert str(folder / name) in caught.value.public_message
        with pytest.raises(InvalidRequest):
            await export(asker, "link")
        assert (tmp_path / "secret").read_text() == "nothing to import"


def good_file(path: Path, salt: str = SALT) -> bytes:
    """A prefix of two blocks."""
    head = PrefixHead(salt=salt, block_size=BLOCK_TOKENS, num_blocks=2)
    with path.open("wb") as file:
        write_head(file, head)
        for number in range(2):
            write_block(file, memoryview(bytes([number]) * 4096))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("empty", "not an exported prefix"),
        ("magic", "not an exported prefix"),
        ("head", "not an exported prefix"),
        ("truncated", "the file ends before block 1|block 1 of the file is damaged"),
        ("flipped", "block 1 of the file is damaged"),
        ("salt", "not an exported prefix"),
    ],
)
async def test_a_bad_file_is_refused_and_says_why(tmp_path: Path, what: str, told: str) -> None:
    folder = tmp_path / "exchange"
    folder.mkdir()
    path = folder / "prefix.kv"
    data = bytearray(good_file(path))
    if what == "empty":
        data.clear()
    elif what == "magic":
        data[3] ^= 1
    elif what == "head":
        data[14] ^= 0x80
    elif what == "truncated":
        del data[-100:]
    elif what == "flipped":
        data[-100] ^= 1
    elif what == "salt":
        data = bytearray(good_file(path, salt=""))
    path.write_bytes(data)
    async with open_asker(tmp_path, **files(tmp_path, cluster_key=KEY)) as asker:
        await ready(asker)
        with pytest.raises(InvalidRequest, match=told):
            await take_in(asker, "prefix.kv")
        assert list(asker.service._tier.names()) == [], "all of it, or nothing"
        assert not asker.service._tier.health.is_failed, "the tier is well"
        stats = await asker.ask("stats", StatsRequest(), StatsReply)
        assert stats.file_state == "on"


async def test_a_prefix_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "exchange").mkdir()
    good_file(tmp_path / "exchange" / "prefix.kv")
    async with open_asker(tmp_path, **files(tmp_path, cluster_key=KEY)) as asker:
        await ready(asker)
        with pytest.raises(InvalidRequest, match="of another model"):
            asked = ImportRequest(path="prefix.kv", salts=("ab" * 16,))
            await asker.ask("import", asked, ExchangeReply)
        asked = ImportRequest(path="prefix.kv", salts=("ab" * 16, SALT))
        assert (await asker.ask("import", asked, ExchangeReply)).num_blocks == 2


async def test_behind_the_private_server_only_the_operator_may(tmp_path: Path) -> None:
    assert OPERATOR == nats_config.SUPERVISOR
    more = files(tmp_path, cluster_key=KEY, nats_user="cache")
    async with open_asker(tmp_path, **more) as asker:
        for act in (export, take_in):
            with pytest.raises(PermissionDenied):
                await act(asker, "prefix.kv")
