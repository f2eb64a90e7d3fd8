"""A worker's dealings with the cache service: leases on arena slots, kept and given back.

    session = ArenaSession(client, owner=instance, owner_epoch=epoch)
    task_group.start_soon(session.run)              # renews leases, retries releases
    if await session.connect():                     # False: no common memory, use lane `nats`
        lease = await session.reserve(request_id, num_blocks, block_bytes)   # maybe fewer slots
        view = session.writer.view(lease.slots[0])  # write the block in place ...
        tickets = await session.commit(lease, [(lease.slots[0], length)])
        await session.release(lease.lease_id)       # once the reader has copied

A process that only reads needs neither `run` nor a lease.

Of several caches the session speaks to the one of its own host (`cache_instance`), and looks for it
anew when that does not answer any more: a restarted cache goes by another name.
"""

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from anyio import to_thread

from finback.shared.actor.client import Client
from finback.shared.errors import ServingError, Unavailable
from finback.shared.lanes.base import checksum
from finback.shared.lanes.host_cache import CacheNames, find_host_cache
from finback.shared.lanes.probe import WriterLock
from finback.shared.lanes.shm import ArenaReader, ArenaWriter, make_ticket
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire.messages.cache import (
    ArenaReply,
    CommitRequest,
    LeaseReply,
    LeaseRequest,
    ReserveReply,
    ReserveRequest,
    Slot,
)

LEASE_MS: Final = 10_000
RENEWALS: Final = 3.3  # in the time of a lease
_TIMEOUT_S: Final = 2.0
_RELEASE_BATCH: Final = 1000
# Reasons of `Unavailable` that say: this start of the cache will not answer any more.
_GONE: Final = frozenset({"no_responders", "stopped", "stopping", "epoch"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotLease:
    """Reserved slots; all of them end with the lease."""

    lease_id: str
    slots: tuple[Slot, ...]


class ArenaSession:
    """One process's hold on the arena of its host. A reader may use it without `run`."""

    def __init__(
        self,
        client: Client,
        *,
        owner: str,
        owner_epoch: int,
        lease_ms: int = LEASE_MS,
        cache_names: CacheNames = tuple,
    ) -> None:
        """`cache_names`: the caches in the registry; by default only whichever the bus picks."""
        self._client = client
        self._cache_names = cache_names
        self._arena: ArenaReply | None = None
        self._finding = anyio.Lock()
        self._owner = owner
        self._owner_epoch = owner_epoch
        self._lease_ms = lease_ms
        self._folder: Path | None = None
        self._lock: WriterLock | None = None
        self._reader: ArenaReader | None = None
        self._writer: ArenaWriter | None = None
        self._held: set[str] = set()
        self._lost: set[str] = set()
        self._unreleased: set[str] = set()

    @property
    def is_connected(self) -> bool:
        """Whether `connect` found common memory."""
        return self._folder is not None

    @property
    def cache_instance(self) -> str:
        """The cache instance of this host; empty until `connect` found it."""
        return "" if self._arena is None else self._arena.instance

    @property
    def folder(self) -> Path:
        """The arena's folder; only once connected."""
        if self._folder is None:
            raise Unavailable("no arena on this host")
        return self._folder

    @property
    def reader(self) -> ArenaReader:
        """Reads tickets; only once connected."""
        if self._reader is None:
            raise Unavailable("no arena on this host")
        return self._reader

    @property
    def writer(self) -> ArenaWriter:
        """Gives views of reserved slots; only once connected."""
        if self._writer is None:
            raise Unavailable("no arena on this host")
        return self._writer

    async def connect(self) -> bool:
        """Find the cache of this host. False when there is none, or none that shares memory."""
        if not self.is_connected:
            await self._find(None)
        return self.is_connected

    async def ask(
        self,
        verb: str,
        message: Any,
        reply_type: type[T],
        *,
        request_id: str = "",
        timeout_s: float = _TIMEOUT_S,
    ) -> T:
        """Ask the cache of this host; one that was restarted meanwhile is found again.

        Raises the cache's `ServingError`, `Unavailable` when there is none on this host.
        """
        asked = self._arena
        try:
            return await self._ask(verb, message, reply_type, request_id, timeout_s)
        except Unavailable as error:
            if error.reason not in _GONE:
                raise
            await self._find(asked)
            if self._arena == asked:
                raise
        return await self._ask(verb, message, reply_type, request_id, timeout_s)

    async def reserve(self, request_id: str, num_blocks: int, block_bytes: int) -> SlotLease:
        """Up to `num_blocks` slots; fewer (even none) when the arena is full.

        Raises `Unavailable` when the cache does not answer: then the blocks take another lane.
        """
        if not self.is_connected:
            raise Unavailable("no arena on this host")
        lease_id = secrets.token_hex(16)
        request = ReserveRequest(
            request_id=request_id,
            owner=self._owner,
            owner_epoch=self._owner_epoch,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            lease_ms=self._lease_ms,
            lease_id=lease_id,
        )
        try:
            reply = await self.ask("reserve", request, ReserveReply, request_id=request_id)
        except BaseException:
            # The reply, not the reservation, may be what was lost: `run` gives it back.
            self._unreleased.add(lease_id)
            raise
        if reply.slots:
            self._held.add(lease_id)
        return SlotLease(lease_id, reply.slots)

    async def commit(
        self, lease: SlotLease, written: Sequence[tuple[Slot, int]], request_id: str = ""
    ) -> tuple[Ticket, ...]:
        """Checksum (slot, length) pairs that were filled in place; their tickets, now readable.

        Drop the views first. Raises `NotFound` when the lease has expired, `Unavailable`.
        """
        tickets = await to_thread.run_sync(self._seal, written)
        await self.commit_tickets(lease, [slot for slot, _ in written], tickets, request_id)
        return tickets

    async def commit_tickets(
        self,
        lease: SlotLease,
        slots: Sequence[Slot],
        tickets: Sequence[Ticket],
        request_id: str = "",
    ) -> None:
        """Make tickets readable that `writer.write` gave for these slots."""
        request = CommitRequest(
            lease_id=lease.lease_id,
            slot_ids=tuple(slot.slot_id for slot in slots),
            checksums=tuple(ticket.checksum for ticket in tickets),
            lengths=tuple(ticket.length for ticket in tickets),
        )
        await self.ask("commit", request, LeaseReply, request_id=request_id)

    async def release(self, *lease_ids: str) -> None:
        """Give leases back, expired ones too. Never fails: `run` repeats what did not get through.

        Nothing may write to the slots any more.
        """
        self._held.difference_update(lease_ids)
        self._lost.difference_update(lease_ids)
        self._unreleased.update(lease_ids)
        with contextlib.suppress(ServingError):
            await self._flush_releases()

    def forget_all(self) -> None:
        """Renew nothing that is held now: the leases end by themselves."""
        self._held.clear()

    def is_lost(self, lease_id: str) -> bool:
        """The lease expired before it could be renewed: its tickets are dead. Release it."""
        return lease_id in self._lost

    async def run(self) -> None:
        """Renew all leases every 3 s and repeat failed releases; runs until cancelled."""
        while True:
            await anyio.sleep(self._lease_ms / 1000 / RENEWALS)
            await self._follow()
            with contextlib.suppress(ServingError):
                await self._flush_releases()
            with contextlib.suppress(ServingError):
                await self._renew()

    def close(self) -> None:
        """Unmap and end the proof of life."""
        for part in (self._reader, self._writer, self._lock):
            if part is not None:
                part.close()
        self._folder = self._reader = self._writer = self._lock = self._arena = None

    async def _follow(self) -> None:
        """One that never asks must know of a restart, too: peers compare whose arena they see."""
        names = set(self._cache_names())
        if self._arena is not None and names and self._arena.instance not in names:
            await self._find(self._arena)

    async def _renew(self) -> None:
        asked = tuple(self._held)
        if asked:
            reply = await self.ask("renew", LeaseRequest(lease_ids=asked), LeaseReply)
            lost = self._held.intersection(asked) - set(reply.held)
            self._held -= lost
            self._lost |= lost

    async def _flush_releases(self) -> None:
        while self._unreleased:
            ids = tuple(islice(self._unreleased, _RELEASE_BATCH))
            await self.ask("release", LeaseRequest(lease_ids=ids), LeaseReply)
            self._unreleased.difference_update(ids)

    def _seal(self, written: Sequence[tuple[Slot, int]]) -> tuple[Ticket, ...]:
        tickets = []
        for slot, length in written:
            with self.writer.view(slot) as view:
                tickets.append(make_ticket(slot, length, checksum(view[:length])))
        return tuple(tickets)

    async def _find(self, but: ArenaReply | None) -> None:
        """Find the cache of this host, unless another call has done so since it was `but`."""
        async with self._finding:
            if self._arena != but:
                return
            arena = await find_host_cache(self._client, self._cache_names)
            if arena is not None:
                self._use(arena)

    def _use(self, arena: ArenaReply) -> None:
        """Speak to this cache from now on; what is mapped stays if the arena is the same."""
        folder = Path(arena.path)
        if self._lock is None or not self._lock.is_in(folder):
            self.close()
            # Leases of another arena mean nothing to this one.
            self._lost |= self._held
            self._held.clear()
            self._unreleased.clear()
            try:
                self._lock = WriterLock(folder, self._owner, self._owner_epoch)
            except OSError:  # gone again
                return
            self._reader, self._writer = ArenaReader(folder), ArenaWriter(folder)
            self._folder = folder
        self._arena = arena

    async def _ask(
        self, verb: str, message: Any, reply_type: type[T], request_id: str, timeout_s: float
    ) -> T:
        if self._arena is None:
            raise Unavailable("no arena on this host")
        subject = self._client.subjects.instance("cache", self._arena.instance, verb)
        return await self._client.call(
            subject,
            message,
            reply_type,
            timeout_s=timeout_s,
            request_id=request_id,
            epoch=self._arena.epoch,
        )
