"""A worker's dealings with the cache of its host as a store: look up, read, keep. Torch-free.

    cache = CacheClient(session, client, salt=spec.salt, owner=instance, owner_epoch=epoch, ...)
    service.spawn(cache.run)                          # renews leases
    found = await cache.lookup(hashes)                # None: no cache
    async with cache.lease(terms) as lease:
        reply = await lease.read(hashes)              # tickets, readable while the lease is held
    async with cache.lease(terms) as lease:
        slots = await lease.store(hashes, first_block=0, payload_bytes=n)
        ...                                           # write them
        tickets = await lease.commit(written)

Nothing here fails a request: a cache that is away, slow or wrong is no cache, for a while.
"""

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import anyio

from finback.shared.actor.client import Client
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, NotFound, ServingError
from finback.shared.lanes.session import LEASE_MS, RENEWALS, ArenaSession, SlotLease
from finback.shared.lanes.ticket import Ticket
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.cache import LeaseReply, LeaseRequest, Slot
from finback.shared.wire.messages.cache_store import (
    BadBlock,
    LookupReply,
    LookupRequest,
    ReadReply,
    ReadRequest,
    StoreReply,
    StoreRequest,
)

MAX_READ: Final = 64
"""Most hashes in one read."""
_LOOKUP_TIMEOUT_S: Final = 0.5
_READ_SLACK_S: Final = 0.5
_STORE_TIMEOUT_S: Final = 2.0
# After a failure the cache is left alone this long, twice as long each time.
QUIET_S: Final = 1.0
MAX_QUIET_S: Final = 16.0
# The reason of a refusal to a writer whose request, or whose process, has a successor.
_SUPERSEDED: Final = "superseded"
_CONNECT_EVERY_S: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTerms:
    """For whom blocks are read or kept, and for how long; see `StoreRequest`."""

    request_id: str
    attempt: int = 1
    tenant: str = ""
    traffic_class: str = "chat"
    retention_s: float | None = None

    @property
    def wants_store(self) -> bool:
        """Are its blocks to be kept at all? Not those of class `batch`, nor with retention 0."""
        if self.retention_s is not None:
            return self.retention_s > 0
        return self.traffic_class != "batch"


class CacheClient:
    """See the module. All methods run on the event loop."""

    def __init__(
        self,
        session: ArenaSession,
        client: Client,
        *,
        salt: str,
        owner: str,
        owner_epoch: int,
        metrics: Metrics,
        log: Any,
    ) -> None:
        self.session = session
        self.salt = salt
        self._owner = owner
        self._owner_epoch = owner_epoch
        self._metrics = metrics
        self._log = log
        self._client = client
        self._held: set[str] = set()
        self._quiet_until_s = 0.0
        self._quiet_s = QUIET_S

    # -- whether there is one

    @property
    def is_quiet(self) -> bool:
        """It failed lately, and is left alone."""
        return monotonic_s() < self._quiet_until_s

    @property
    def is_there(self) -> bool:
        """Whether the cache of this host was found (`run` looks for it) and has not failed lately."""
        return self.session.is_connected and not self.is_quiet

    def failed(self, why: str) -> None:
        """Leave it alone for a while."""
        self._quiet_until_s = monotonic_s() + self._quiet_s
        self._quiet_s = min(MAX_QUIET_S, 2 * self._quiet_s)
        self._metrics.count("finback.worker.cache_failures")
        self._log.warning("the cache failed, doing without", error=why)

    # -- questions

    async def lookup(
        self,
        hashes: Sequence[bytes],
        request_id: str = "",
        *,
        kind: str = "block",
        traffic_class: str = "",
    ) -> LookupReply | None:
        """How much of this run is there; None when there is no cache."""
        request = LookupRequest(
            salt=self.salt, hashes=b"".join(hashes), kind=kind, traffic_class=traffic_class
        )
        return await self.ask("lookup", request, LookupReply, _LOOKUP_TIMEOUT_S, request_id)

    async def report_bad(self, block_hash: bytes, ticket: Ticket, reason: str) -> None:
        """This copy failed its check: the cache should look, and give it to nobody else."""
        self._metrics.count("finback.worker.bad_blocks", reason=reason)
        report = BadBlock(salt=self.salt, hash=block_hash, ticket=ticket, reason=reason)
        instance = self.session.cache_instance
        if instance:
            subject = self._client.subjects.instance("cache", instance, "bad-block")
            with contextlib.suppress(ServingError):
                await self._client.publish(subject, report)

    async def ask(
        self, verb: str, message: Any, reply_type: type[T], timeout_s: float, request_id: str
    ) -> T | None:
        """Ask the cache; None when it cannot be asked or fails."""
        if not self.is_there:
            return None
        try:
            reply = await self.session.ask(
                verb, message, reply_type, request_id=request_id, timeout_s=timeout_s
            )
        except ServingError as error:
            if isinstance(error, InvalidRequest | NotFound) or error.reason == _SUPERSEDED:
                # It lives, and refuses this.
                self._metrics.count("finback.worker.cache_refusals", verb=verb)
                self._log.warning("the cache refused", verb=verb, error=error.public_message)
            else:
                self.failed(f"{verb}: {error.public_message}")
            return None
        self._quiet_s = QUIET_S
        return reply

    # -- leases

    @contextlib.asynccontextmanager
    async def lease(self, terms: StoreTerms) -> AsyncIterator["CacheLease"]:
        """A lease for reads and stores, renewed meanwhile and released on every way out."""
        lease = self.open_lease(terms)
        try:
            yield lease
        finally:
            await self.release(lease)

    def open_lease(self, terms: StoreTerms) -> "CacheLease":
        """A lease that the caller gives to `release`."""
        return CacheLease(cache=self, terms=terms)

    async def release(self, lease: "CacheLease") -> None:
        """Give it back; never fails, the session repeats what did not get through."""
        self._held.discard(lease.lease_id)
        if lease.is_used:
            lease.is_used = False
            with anyio.CancelScope(shield=True):
                await self.session.release(lease.lease_id)

    def keep(self, lease_id: str) -> None:
        """Renew this lease until it is released."""
        self._held.add(lease_id)

    @property
    def num_leases(self) -> int:
        """Leases held now."""
        return len(self._held)

    @property
    def identity(self) -> tuple[str, int]:
        """The owner of leases and its epoch, which fence a process that was replaced."""
        return self._owner, self._owner_epoch

    async def run(self) -> None:
        """Find the cache of this host, then renew all leases every 3 s; runs until cancelled."""
        while True:
            if not await self.session.connect():
                await anyio.sleep(_CONNECT_EVERY_S)
                continue
            await anyio.sleep(LEASE_MS / 1000 / RENEWALS)
            with contextlib.suppress(ServingError):
                await self._renew()

    async def _renew(self) -> None:
        held = tuple(self._held)
        if held:
            reply = await self.session.ask("renew", LeaseRequest(lease_ids=held), LeaseReply)
            # What is lost is noticed on the copy: its generation or checksum is wrong.
            self._held.difference_update(set(held) - set(reply.held))


@dataclass(slots=True, kw_only=True, eq=False)
class CacheLease:
    """One lease for the reads and stores of one request."""

    cache: CacheClient
    terms: StoreTerms
    lease_id: str = field(default_factory=lambda: secrets.token_hex(16))
    is_used: bool = False

    async def read(
        self, hashes: Sequence[bytes], wait_ms: int = 2_000, *, kind: str = "block"
    ) -> ReadReply | None:
        """Tickets of the leading run of at most `MAX_READ` blocks; None when there is no cache."""
        owner, epoch = self.cache.identity
        request = ReadRequest(
            request_id=self.terms.request_id,
            owner=owner,
            owner_epoch=epoch,
            salt=self.cache.salt,
            hashes=b"".join(hashes),
            lease_id=self.lease_id,
            kind=kind,
            wait_ms=wait_ms,
            traffic_class=self.terms.traffic_class,
        )
        self._begin()
        timeout_s = wait_ms / 1000 + _READ_SLACK_S
        return await self.cache.ask("read", request, ReadReply, timeout_s, self.terms.request_id)

    async def store(
        self,
        hashes: Sequence[bytes],
        *,
        first_block: int,
        payload_bytes: int,
        prompt_blocks: int = 0,
        kind: str = "block",
    ) -> StoreReply | None:
        """Slots for those of these blocks that the cache has not and wants."""
        owner, epoch = self.cache.identity
        terms = self.terms
        request = StoreRequest(
            request_id=terms.request_id,
            owner=owner,
            owner_epoch=epoch,
            salt=self.cache.salt,
            hashes=b"".join(hashes),
            payload_bytes=payload_bytes,
            first_block=first_block,
            prompt_blocks=prompt_blocks,
            kind=kind,
            tenant=terms.tenant,
            traffic_class=terms.traffic_class,
            retention_s=terms.retention_s,
            lease_id=self.lease_id,
            attempt=terms.attempt,
        )
        self._begin()
        return await self.cache.ask(
            "store", request, StoreReply, _STORE_TIMEOUT_S, terms.request_id
        )

    async def commit(self, written: Sequence[tuple[Slot, int]]) -> tuple[Ticket, ...] | None:
        """Make (slot, length) pairs that are written findable; their tickets, None on failure."""
        lease = SlotLease(self.lease_id, tuple(slot for slot, _ in written))
        commit = self.cache.session.commit(lease, written, self.terms.request_id)
        return await self._or_none(commit)

    async def commit_tickets(self, written: Sequence[tuple[Slot, Ticket]]) -> bool:
        """As `commit`, of slots written by `session.writer.write`; False on failure."""
        slots = tuple(slot for slot, _ in written)
        tickets = [ticket for _, ticket in written]
        lease = SlotLease(self.lease_id, slots)
        session, request_id = self.cache.session, self.terms.request_id

        async def commit() -> bool:
            await session.commit_tickets(lease, slots, tickets, request_id)
            return True

        return bool(await self._or_none(commit()))

    async def _or_none(self, commit: Awaitable[T]) -> T | None:
        try:
            return await commit
        except (OSError, ValueError) as error:  # the arena was made anew, or is gone
            self.cache.failed(f"commit: {error}")
        except ServingError as error:
            self.cache.failed(f"commit: {error.public_message}")
        return None

    def _begin(self) -> None:
        self.is_used = True
        self.cache.keep(self.lease_id)
