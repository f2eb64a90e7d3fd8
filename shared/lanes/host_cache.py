"""Which of several cache instances is the one of this host? The one whose nonce can be read here.

Never told by a name: two hosts may have equal paths and host names, and containers on one host may
not share memory.
"""

from collections.abc import Callable, Iterable
from typing import Final

import anyio
from anyio import to_thread

from finback.shared.actor.client import Client
from finback.shared.errors import ServingError
from finback.shared.lanes.probe import probe
from finback.shared.wire.messages.cache import ArenaReply, ArenaRequest

# Instances of `cache` that are in the registry; none known is no proof that there is none.
CacheNames = Callable[[], Iterable[str]]
MAX_ASKED: Final = 64
_TIMEOUT_S: Final = 2.0


async def find_host_cache(client: Client, names: CacheNames) -> ArenaReply | None:
    """Ask every known cache, and whichever the bus picks, for its arena; the one found on this host.

    None when there is none. Returns with the first that can be read, waiting for no other.
    """
    subjects = [client.subjects.service("cache", "arena")]
    subjects += [client.subjects.instance("cache", name, "arena") for name in names()]
    found: list[ArenaReply] = []

    async def ask(subject: str, scope: anyio.CancelScope) -> None:
        try:
            arena = await client.call(subject, ArenaRequest(), ArenaReply, timeout_s=_TIMEOUT_S)
        except ServingError:
            return
        if await to_thread.run_sync(probe, arena.path, arena.nonce):
            found.append(arena)
            scope.cancel()

    async with anyio.create_task_group() as group:
        for subject in subjects[:MAX_ASKED]:
            group.start_soon(ask, subject, group.cancel_scope)
    return found[0] if found else None
