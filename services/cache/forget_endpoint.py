"""`forget`: nothing of what is asked for is found in any tier from then on, whatever was under way.

1. the rule is known to all work under way; 2. memory; 3. files; 4. older work has ended; 5. memory and
files once more, for what such work had stored before it could know the rule.
"""

from collections.abc import Iterator
from typing import Final

import anyio
import anyio.lowlevel

from finback.services.cache.block_names import check_salt, hashes_of
from finback.services.cache.file_admin import FileAdmin
from finback.services.cache.forgotten import ForgetRule, Forgotten, rule_of
from finback.services.cache.index import BlockIndex
from finback.services.cache.slots import SlotKey
from finback.services.cache.store import KvStore
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.errors import InvalidRequest, Unavailable
from finback.shared.wire.messages.cache_admin import ForgetReply, ForgetRequest

SETTLE_S: Final = 60.0  # for reads and writes of files that were under way
_POLL_S: Final = 0.02
_BATCH: Final = 128  # blocks between two looks at the mailbox


class ForgetEndpoint:
    """Drops blocks in both tiers."""

    def __init__(
        self, service: Service, store: KvStore, files: FileAdmin, forgotten: Forgotten
    ) -> None:
        self._service = service
        self._store = store
        self._files = files
        self._forgotten = forgotten

    async def start(self) -> None:
        """Answer from now on."""
        await self._service.add_endpoint(
            "forget", ForgetRequest, self._on_forget, scope="both", workers=2
        )

    async def _on_forget(self, call: Call[ForgetRequest]) -> ForgetReply:
        request = call.message
        rule = _rule(request)
        at = self._forgotten.add(rule)
        self._store.top.forget(rule.covers_prefix)
        num_host = await self._forget_host(rule)
        num_files = await self._files.forget(request)
        await self._settle(at)
        num_host += await self._forget_host(rule)
        num_files += await self._files.forget(request)
        self._service.metrics.count("finback.cache.forgotten", num_host, tier="host")
        self._service.metrics.count("finback.cache.forgotten", num_files, tier="file")
        return ForgetReply(num_host=num_host, num_files=num_files)

    async def _forget_host(self, rule: ForgetRule) -> int:
        keys = _chosen(self._store.arena.book.index, rule)
        num_host = 0
        while keys:
            part = [keys.pop() for _ in range(min(_BATCH, len(keys)))]
            num_host += self._store.give_up(part, "forgotten")
            await anyio.lowlevel.checkpoint()
        return num_host

    async def _settle(self, at: int) -> None:
        """Until all work has ended that began before the rule of that time."""
        with anyio.move_on_after(SETTLE_S):
            while self._forgotten.num_before(at):  # noqa: ASYNC110  # worker threads end it
                await anyio.sleep(_POLL_S)
            return
        raise Unavailable(
            "blocks are still on their way to or from files; they are dropped when they arrive, "
            "but that was not waited for: ask again"
        )


def _rule(request: ForgetRequest) -> ForgetRule:
    if not (request.is_all or request.salt or request.hashes or request.tenant is not None):
        raise InvalidRequest("say whom or what to forget", param="tenant")
    if request.salt:
        check_salt(request.salt)
    hashes = hashes_of(request.salt or "any", request.hashes) if request.hashes else []
    return rule_of(request, hashes)


def _chosen(index: BlockIndex, rule: ForgetRule) -> set[SlotKey]:
    """Slots of blocks that are kept, or being written, and that the rule covers."""
    return set(_covered(index, rule))


def _covered(index: BlockIndex, rule: ForgetRule) -> Iterator[SlotKey]:
    if rule.is_all:
        yield from [key for _, key in index.items()]
    if rule.tenant is not None:
        yield from index.tenant(rule.tenant)
    if rule.salt and not rule.hashes:
        yield from index.salt(rule.salt)
    if rule.hashes:
        for (salt, _, digest), key in list(index.items()):
            if digest in rule.hashes and rule.salt in ("", salt):
                yield key
