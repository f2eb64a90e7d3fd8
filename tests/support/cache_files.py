"""A cache with memory and files, for tests that move blocks between the two."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from finback.shared.wire.messages.cache_admin import EvictReply, EvictRequest
from support.cache_asker import Asker
from support.kv_store import SALT, digest

NAMES: Final = [*"abcdefghijkl"]


def files(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Settings with a file tier."""
    return {"cache_dir": str(tmp_path / "files"), "cache_dir_bytes": 2**26, **more}


async def until(found: Callable[[], Any], timeout_s: float = 60.0) -> None:
    with anyio.fail_after(timeout_s):
        while not found():  # noqa: ASYNC110 -- a thread's work is waited for
            await anyio.sleep(0.01)


def num_written(asker: Asker) -> float:
    return asker.service.metrics.value("finback.cache.write_backs", outcome="written")


async def ready(asker: Asker) -> None:
    await until(lambda: asker.service._tier.health.state == "on")


async def keep_in_files(asker: Asker, names: Sequence[str] = NAMES, **more: Any) -> None:
    """Stored, written, and gone from memory."""
    await ready(asker)
    before = num_written(asker)
    await asker.keep(names, **more)
    await until(lambda: num_written(asker) == before + len(names))
    await asker.ask("evict", EvictRequest(), EvictReply)
    assert asker.service.arena.counts().num_kept == 0


def in_files(asker: Asker, names: Sequence[str]) -> list[str]:
    """Those of the blocks that the segments have, whatever the service believes."""
    store = asker.service._tier._store
    assert store is not None
    found = store.lookup(SALT, [digest(name) for name in names])
    return [name for name, is_there in zip(names, found, strict=True) if is_there]
