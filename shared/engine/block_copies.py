"""Copies blocks from tickets into the device pool: verified off the event loop, a few at a time.

A group of blocks is one hop to a thread (copy and checksum) and one to the device thread; the next
group is read while the one before is put in its place.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from anyio import to_thread

from finback.shared.engine.prefix_hold import PrefixHold
from finback.shared.engine.prefix_port import PrefixPort
from finback.shared.errors import ServingError
from finback.shared.kv.cache_client import CacheClient
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.select import LaneSet
from finback.shared.lanes.shm import KIND as SHM
from finback.shared.lanes.shm import ArenaReader
from finback.shared.lanes.ticket import Ticket

GROUP_BLOCKS: Final = 4
GROUP_BYTES: Final = 8 * 2**20
"""Most in a group: few enough not to hold up a step for long."""
MAX_GROUPS: Final = 2
"""Groups on their way, of all requests together."""
BAD: Final = frozenset({"checksum", "length", "tokens"})
"""What a bad copy says of the block itself, rather than of its place having been given away."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Block `index` of a prompt, and where it lies."""

    index: int
    ticket: Ticket


class BlockCopier:
    """One for an engine. `payload_bytes`: length of a stored block here."""

    def __init__(
        self, prefixes: PrefixPort, cache: CacheClient, lanes: LaneSet, payload_bytes: int
    ) -> None:
        self._prefixes = prefixes
        self._cache = cache
        self._lanes = lanes
        self._payload_bytes = payload_bytes
        self._group_blocks = max(1, min(GROUP_BLOCKS, GROUP_BYTES // payload_bytes))
        self._free = asyncio.Semaphore(MAX_GROUPS)
        # Kept, for pages that were touched once are quicker.
        self._buffers: list[list[memoryview]] = []

    async def copy(self, hold: PrefixHold, wanted: list[Wanted]) -> str:
        """Copy these blocks in order, up to the first that cannot be had; why, or nothing."""
        misses: list[str] = []
        async with asyncio.TaskGroup() as tasks:
            for at in range(0, len(wanted), self._group_blocks):
                # Bounded here: a group is begun when there are buffers again.
                await self._free.acquire()
                if misses:
                    self._free.release()
                    break
                group = wanted[at : at + self._group_blocks]
                tasks.create_task(self._copy_group(hold, group, misses))
        return misses[0] if misses else ""

    async def _copy_group(self, hold: PrefixHold, group: list[Wanted], misses: list[str]) -> None:
        try:
            buffers = self._buffers.pop() if self._buffers else self._new_buffers()
            miss = await self._read_and_restore(hold, group, buffers)
            # Only now: a copy that was cancelled may still be running.
            self._buffers.append(buffers)
        except ServingError:
            miss = "failed"
        finally:
            self._free.release()
        if miss:
            misses.append(miss)

    async def _read_and_restore(
        self, hold: PrefixHold, group: list[Wanted], buffers: list[memoryview]
    ) -> str:
        error = await self._read(group, buffers)
        count = len(group) if error is None else error[0]
        blocks = [(one.index, out) for one, out in zip(group[:count], buffers, strict=False)]
        try:
            are_held = await self._prefixes.restore(hold, blocks)
        except ValueError as mixed_up:
            error, are_held = (0, CorruptData("tokens", str(mixed_up))), []
        if error is None:
            return "" if all(are_held) else "no_room"
        at, corrupt = error
        if corrupt.reason in BAD:
            block_hash = hold.hashes[group[at].index]
            await self._cache.report_bad(block_hash, group[at].ticket, corrupt.reason)
        return corrupt.reason

    async def _read(
        self, group: list[Wanted], buffers: list[memoryview]
    ) -> tuple[int, CorruptData] | None:
        """Copy and verify; (which one, why) of the first that could not be had."""
        for at, one in enumerate(group):
            if one.ticket.length != self._payload_bytes:
                error = CorruptData("length", f"{one.ticket.length} bytes")
                return await self._read(group[:at], buffers) or (at, error)
        session = self._cache.session
        if session.is_connected and all(one.ticket.kind == SHM for one in group):
            return await to_thread.run_sync(_read_now, session.reader, group, buffers)
        for at, (one, out) in enumerate(zip(group, buffers, strict=False)):
            try:
                await self._lanes.get(one.ticket, out)
            except CorruptData as error:
                return at, error
        return None

    def _new_buffers(self) -> list[memoryview]:
        return [memoryview(bytearray(self._payload_bytes)) for _ in range(self._group_blocks)]


def _read_now(
    reader: ArenaReader, group: list[Wanted], buffers: list[memoryview]
) -> tuple[int, CorruptData] | None:
    for at, (one, out) in enumerate(zip(group, buffers, strict=False)):
        try:
            reader.read_now(one.ticket, out)
        except CorruptData as error:
            return at, error
    return None
