"""The arena grows in a worker thread: the cache answers meanwhile, and the bound holds."""

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from finback.services.cache.arena_files import ArenaFiles
from finback.shared.wire.messages.cache import ReserveReply, ReserveRequest
from support.cache_asker import open_asker
from support.cache_files import until


async def test_readers_do_not_wait_for_an_extent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, is_reached, real = threading.Event(), threading.Event(), ArenaFiles.make

    def make(self: ArenaFiles, *args: Any) -> Any:
        is_reached.set()
        assert gate.wait(20)
        return real(self, *args)

    async with open_asker(tmp_path) as asker:
        await asker.keep(["a"])
        monkeypatch.setattr(ArenaFiles, "make", make)
        async with anyio.create_task_group() as group:
            # Of another size, so that a new extent is needed.
            group.start_soon(lambda: asker.store(["b"], payload_bytes=100_000))
            await until(is_reached.is_set)
            assert (await asker.lookup(["a"])).num_found == 1
            gate.set()
        assert asker.service.arena.counts().num_reserved == 1


async def test_claims_of_extents_that_are_made_at_once_keep_the_bound(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:

        async def reserve(number: int) -> None:
            request = ReserveRequest(
                request_id="r",
                owner="prefill-a",
                owner_epoch=5,
                num_blocks=20,
                block_bytes=10_000 * (number + 1),
            )
            await asker.ask("reserve", request, ReserveReply)

        async with anyio.create_task_group() as group:
            for number in range(8):
                group.start_soon(reserve, number)
                group.start_soon(lambda n=number: asker.store([n], payload_bytes=9_000 * (n + 1)))  # type: ignore[misc]  # a default binds the loop's value
        assert asker.service.arena.num_bytes <= 2**21
        asker.service.arena.check_integrity()


def test_make_leaves_the_books_alone(tmp_path: Path) -> None:
    files = ArenaFiles(tmp_path / "a", max_bytes=2**20, extent_bytes=2**18)
    with files.claim(4096, 4) as first, files.claim(4096, 4) as second:
        assert (first, second) == (2**18, 2**18)
        made = files.make(4096, first)
        assert made is not None
        assert files.num_bytes == 0
    files.add(made)
    assert files.num_bytes == made.header.file_bytes
    with files.claim(2**19, 100) as most:
        assert most == 2**20 - files.num_bytes, "what is left"
    files.close()
