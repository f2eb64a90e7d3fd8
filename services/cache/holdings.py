"""What this cache tells the bus of its blocks: those in memory, and those in files."""

from collections.abc import Iterator, Sequence
from typing import Final

from finback.services.cache.file_tier import FileTier
from finback.services.cache.store import KvStore
from finback.shared.actor.service import Service
from finback.shared.kv.kv_events import Holding, KvPublisher
from finback.shared.lanes.arena_format import BlockKind, BlockLabel, SlotState

HOST: Final = "host"
FILE: Final = "file"


class Holdings:
    """Publishes KV events of both tiers, and answers snapshots."""

    def __init__(self, service: Service, store: KvStore) -> None:
        self._store = store
        self.tier: FileTier | None = None
        self._publisher = KvPublisher(service, name="cache", holdings=self._all)

    async def start(self) -> None:
        """Tell from now on."""
        self._store.arena.kept.on_change = self._host_changed
        await self._publisher.start()

    def files_changed(self, salt: str, hashes: Sequence[bytes], is_there: bool) -> None:
        """Blocks came into the files, or went."""
        if is_there:
            self._publisher.stored(salt, FILE, hashes)
        else:
            self._publisher.removed(salt, FILE, hashes)

    def _host_changed(self, label: BlockLabel, is_there: bool) -> None:
        if is_there:
            self._publisher.stored(label.salt, HOST, (label.hash,))
        else:
            self._publisher.removed(label.salt, HOST, (label.hash,))

    def _all(self) -> Iterator[Holding]:
        book = self._store.arena.book
        for salt in book.index.salts(BlockKind.BLOCK):
            pool = book.index.pool(salt, BlockKind.BLOCK)
            yield (
                salt,
                HOST,
                [h for h, key in pool.items() if book.header(key).state is SlotState.KEPT],
            )
        if self.tier is not None:
            for salt, hashes in self.tier.names():
                yield salt, FILE, list(hashes)
