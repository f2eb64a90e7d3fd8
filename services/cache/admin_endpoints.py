"""What operators ask: pin, unpin, evict, verify, export, import."""

import math
from typing import Any, Final

import anyio.lowlevel

from finback.services.cache.block_endpoints import BlockEndpoints
from finback.services.cache.block_names import hashes_of, tenant_digest
from finback.services.cache.evict_choice import EvictChoice
from finback.services.cache.file_admin import FileAdmin
from finback.services.cache.retention import traffic_class
from finback.services.cache.slots import SlotKey
from finback.services.cache.store import KvStore
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.errors import InvalidRequest, PermissionDenied
from finback.shared.lanes.arena_format import SlotState, TrafficClass
from finback.shared.lanes.base import CorruptData
from finback.shared.wire.messages.cache_admin import (
    EvictReply,
    EvictRequest,
    ExchangeReply,
    ExportRequest,
    ImportRequest,
    PinReply,
    PinRequest,
    UnpinRequest,
    VerifyReply,
    VerifyRequest,
)

TIERS: Final = ("host", "file")
OPERATOR: Final = "supervisor"  # its user of the private NATS server (ADR 3)
_BATCH: Final = 128  # blocks between two looks at the mailbox
_MAX_VERIFY_BYTES: Final = 2**30


class AdminEndpoints:
    """The operators' endpoints of one cache service."""

    def __init__(
        self, service: Service, store: KvStore, blocks: BlockEndpoints, files: FileAdmin
    ) -> None:
        self._service = service
        self._store = store
        self._blocks = blocks
        self._files = files
        self._book = store.arena.book
        self._kept = store.arena.kept

    async def start(self) -> None:
        """Answer from now on."""
        for verb, request_type, handler in (
            ("pin", PinRequest, self._on_pin),
            ("unpin", UnpinRequest, self._on_unpin),
            ("evict", EvictRequest, self._on_evict),
            ("verify", VerifyRequest, self._on_verify),
            ("export", ExportRequest, self._on_export),
            ("import", ImportRequest, self._on_import),
        ):
            await self._service.add_endpoint(verb, request_type, handler, scope="both", workers=2)

    # --- files, pin, evict

    async def _on_export(self, call: Call[ExportRequest]) -> ExchangeReply:
        request = call.message
        self._check_operator(call)
        hashes = hashes_of(request.salt, request.hashes)
        num_blocks = await self._files.export(
            request.path, request.salt, hashes, request.block_size
        )
        return ExchangeReply(num_blocks=num_blocks, salt=request.salt)

    async def _on_import(self, call: Call[ImportRequest]) -> ExchangeReply:
        self._check_operator(call)
        request, config = call.message, self._service.config
        retention_s = request.retention_s
        if retention_s is None:
            retention_s = config.cache_retention_chat_s
        salt, hashes = await self._files.import_(
            request.path,
            request.cache_salt,
            request.tenant,
            min(retention_s, config.cache_retention_max_s),
            request.salts,
        )
        return ExchangeReply(num_blocks=len(hashes), salt=salt, hashes=b"".join(hashes))

    def _check_operator(self, call: Call[Any]) -> None:
        """Behind the private server only the supervisor's user may; that server refuses others, too."""
        is_private = self._service.config.nats_user == self._service.name
        if is_private and call.asker != OPERATOR:
            raise PermissionDenied("only the stack's operator may move prefixes in and out")

    async def _on_pin(self, call: Call[PinRequest]) -> PinReply:
        request = call.message
        num_blocks, num_held = self._store.pin(request.name, request.salt, request.hashes)
        hashes = hashes_of(request.salt, request.hashes)
        num_files = await self._files.pin(request.name, request.salt, hashes)
        return PinReply(num_blocks=num_blocks, num_held=num_held, num_files=num_files)

    async def _on_unpin(self, call: Call[UnpinRequest]) -> PinReply:
        self._store.unpin(call.message.name)
        await self._files.unpin(call.message.name)
        return PinReply(num_blocks=0, num_held=0)

    async def _on_evict(self, call: Call[EvictRequest]) -> EvictReply:
        request = call.message
        if request.tier != "host":
            raise InvalidRequest("files are only forgotten, not evicted", param="tier")
        if request.num_bytes < 0:
            raise InvalidRequest("num_bytes must be 0 or more", param="num_bytes")
        if not 0 <= request.older_than_s < math.inf:
            raise InvalidRequest("older_than_s must be 0 or more", param="older_than_s")
        choice = self._choice(request)
        num_blocks = num_bytes = num_seen = 0
        for key in choice.keys(self._book, self._kept):
            if request.num_bytes and num_bytes >= request.num_bytes:
                break
            num_seen += 1
            if num_seen % _BATCH == 0:
                await anyio.lowlevel.checkpoint()
            if choice.rank(key, self._book, self._kept) is None:  # it was taken meanwhile
                continue
            num_blocks += 1
            num_bytes += self._book.slot_bytes(key)
            self._store.give_up([key], "asked")
        return EvictReply(num_blocks=num_blocks, num_bytes=num_bytes)

    def _choice(self, request: EvictRequest) -> EvictChoice:
        named = request.traffic_class
        before_s = self._store.clocks.now().mono_s - request.older_than_s
        return EvictChoice(
            highest=traffic_class(named) if named else TrafficClass.AGENT,
            tenant=None if request.tenant is None else tenant_digest(request.tenant),
            before_s=before_s if request.older_than_s else None,
        )

    # --- verify

    async def _on_verify(self, call: Call[VerifyRequest]) -> VerifyReply:
        request = call.message
        _check_tier(request.tier)
        if not 0 < request.max_bytes <= _MAX_VERIFY_BYTES:
            raise InvalidRequest(f"max_bytes must be 1 to {_MAX_VERIFY_BYTES}", param="max_bytes")
        if request.tier == "file":
            return await self._files.verify(request.cursor, request.max_bytes)
        num_checked = num_bad = num_bytes = 0
        last: SlotKey | None = None
        for key in self._kept_after(_parse(request.cursor)):
            if num_bytes >= request.max_bytes:
                return VerifyReply(
                    num_checked=num_checked,
                    num_bad=num_bad,
                    num_bytes=num_bytes,
                    next_cursor=_cursor(last),
                )
            last = key
            is_good = await self._is_good(key)
            num_checked += is_good is not None
            num_bad += is_good is False
            num_bytes += self._book.header(key).length if is_good else 0
        return VerifyReply(num_checked=num_checked, num_bad=num_bad, num_bytes=num_bytes)

    def _kept_after(self, start: SlotKey | None) -> list[SlotKey]:
        keys = (key for key, header in self._book.slots() if header.state is SlotState.KEPT)
        return sorted(key for key in keys if start is None or key > start)

    async def _is_good(self, key: SlotKey) -> bool | None:
        """None: the slot has changed hands meanwhile."""
        if not self._book.has(key):
            return None
        header = self._book.header(key)
        if header.state is not SlotState.KEPT:
            return None
        ticket = self._store.arena.ticket(key)
        try:
            await self._blocks.reader.read(ticket)
        except CorruptData as error:
            if error.reason in ("generation", "gone"):
                return None
            self._blocks.found_corrupt(key, header.generation, error.reason)
            return False
        return True


def _check_tier(tier: str) -> None:
    if tier not in TIERS:
        raise InvalidRequest(f"tier must be one of {', '.join(TIERS)}", param="tier")


def _cursor(key: SlotKey | None) -> str:
    return "" if key is None else f"{key[0]:x}:{key[1]}"


def _parse(cursor: str) -> SlotKey | None:
    if not cursor:
        return None
    extent, _, index = cursor.partition(":")
    try:
        return int(extent, 16), int(index)
    except ValueError:
        raise InvalidRequest("cursor must be one of this cache", param="cursor") from None
