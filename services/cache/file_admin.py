"""What operators ask of the file tier."""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from finback.services.cache.block_names import hashes_of, tenant_digest
from finback.services.cache.exchange_folder import ExchangeFolder
from finback.services.cache.file_tier import FileTier
from finback.services.cache.segments.exchange_format import read_blocks, read_head
from finback.services.cache.segments.record import Miss
from finback.shared.clock import unix_s
from finback.shared.errors import InvalidRequest, NotFound, ServingError, Unavailable
from finback.shared.wire.messages.cache_admin import ForgetRequest, TierUsage, VerifyReply

if TYPE_CHECKING:
    from finback.services.cache.segments.scrub import Progress
    from finback.services.cache.segments.store import SegmentStore

T = TypeVar("T")

_FORGET_S: Final = 60.0
_VERIFY_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStats:
    """What `stats` tells of the tier."""

    state: str
    num_bytes: int = 0
    max_bytes: int = 0
    usage: tuple[TierUsage, ...] = ()


class FileAdmin:
    """Stats, forget, pin and verify of a tier that may be off, or failing."""

    def __init__(self, tier: FileTier, exchange: ExchangeFolder) -> None:
        self._tier = tier
        self._exchange = exchange
        self._scrub: tuple[str, Iterator[Progress], tuple[int, int, int]] | None = None

    async def stats(self) -> FileStats:
        """How full it is."""
        found = await self._tier.call(lambda store: store.stats())
        if found is None:
            return FileStats(state=self._tier.health.state)
        return FileStats(
            state=self._tier.health.state,
            num_bytes=found.taken_bytes,
            max_bytes=found.max_bytes,
            usage=tuple(
                TierUsage(
                    tier="file",
                    kind="block",
                    traffic_class=name,
                    num_blocks=usage.num_blocks,
                    num_bytes=usage.num_bytes,
                )
                for name, usage in found.by_class.items()
            ),
        )

    async def forget(self, request: ForgetRequest) -> int:
        """Erase; returns how many. Raises `Unavailable` if the tier is there and cannot do it."""
        num_gone = 0
        for what in _chosen(request) if self._tier.health.state != "off" else ():
            gone = await self._tier.call(_Forget(what), timeout_s=_FORGET_S)
            if gone is None:
                raise Unavailable(f"the file tier has not forgotten: {self._tier.health.state}")
            num_gone += gone
        return num_gone

    async def pin(self, name: str, salt: str, hashes: Sequence[bytes]) -> int:
        """Keep these blocks; returns how many are in the files."""

        def ask(store: "SegmentStore") -> int:
            store.pin(name, salt, hashes)
            return sum(store.lookup(salt, hashes))

        return await self._tier.call(ask) or 0

    async def unpin(self, name: str) -> None:
        """Let go of a pin."""
        await self._tier.call(lambda store: store.unpin(name))

    async def export(self, path: str, salt: str, hashes: Sequence[bytes], block_size: int) -> int:
        """Write a prefix to a new file of the exchange folder; returns how many blocks."""
        name = self._exchange.name_of(path)

        def ask(store: "SegmentStore") -> int | Exception:
            # The tier itself is well, whatever happens here: it must not be left alone for it.
            try:
                file = self._exchange.create(name)
            except OSError as error:
                return error
            try:
                with file:
                    return store.export(salt, hashes, file, block_size=block_size)
            except (OSError, ServingError, Miss) as error:
                self._exchange.remove(name)
                return error

        return _told(await self._asked(ask), self._exchange.folder / name)

    async def import_(
        self,
        path: str,
        cache_salt: str,
        tenant: str,
        retention_s: float,
        salts: Collection[str] = (),
    ) -> tuple[str, list[bytes]]:
        """Store an exported prefix; returns its salt, and the hashes that it has here.

        All of the file is checked first, so that a bad one leaves nothing behind. `salts`: those that
        its blocks may fit; empty: any.
        """
        name = self._exchange.name_of(path)

        def ask(store: "SegmentStore") -> tuple[str, list[bytes]] | Exception:
            try:
                with self._exchange.open(name) as file:
                    _check_file(file, salts)
                    file.seek(0)
                    return store.import_(
                        file,
                        cache_salt=cache_salt,
                        tenant=tenant_digest(tenant).hex(),
                        expires_unix_s=unix_s() + retention_s,
                    )
            except (OSError, ServingError) as error:
                return error

        return _told(await self._asked(ask), self._exchange.folder / name)

    async def _asked(self, ask: Callable[["SegmentStore"], T]) -> T:
        found = await self._tier.call(ask, timeout_s=_VERIFY_S)
        if found is None:
            raise Unavailable(f"the file tier is not to be had: {self._tier.health.state}")
        return found

    async def verify(self, cursor: str, max_bytes: int) -> VerifyReply:
        """Check records from where the reply before ended, up to so many bytes."""
        if self._tier.health.state == "off":
            return VerifyReply(num_checked=0, num_bad=0, num_bytes=0)
        found = await self._tier.call(
            lambda store: self._verify(store, cursor, max_bytes), timeout_s=_VERIFY_S
        )
        if found is None:
            raise Unavailable(f"the file tier cannot be checked: {self._tier.health.state}")
        return found

    def _verify(self, store: "SegmentStore", cursor: str, max_bytes: int) -> VerifyReply:
        if not cursor:
            self._scrub = (secrets.token_hex(8), store.verify(), (0, 0, 0))
        if self._scrub is None or cursor not in ("", self._scrub[0]):
            raise NotFound("that check has ended; begin anew", param="cursor", reason="cursor")
        token, steps, before = self._scrub
        now, is_done = before, True
        for step in steps:
            now = (step.num_checked, step.num_bad, step.num_bytes)
            if now[2] - before[2] >= max_bytes:
                is_done = False
                break
        self._scrub = None if is_done else (token, steps, now)
        num_checked, num_bad, num_bytes = (
            after - at for after, at in zip(now, before, strict=True)
        )
        return VerifyReply(
            num_checked=num_checked,
            num_bad=num_bad,
            num_bytes=num_bytes,
            next_cursor="" if is_done else token,
        )


def _check_file(file: BinaryIO, salts: Collection[str]) -> None:
    """InvalidRequest unless every byte is as it was exported, of a model that is served here."""
    head = read_head(file)
    if salts and head.salt not in salts:
        raise InvalidRequest(
            "the file's blocks are of another model, layout or numerics than those of this stack's "
            f"workers (salt {head.salt[:16]}, not {', '.join(sorted(s[:16] for s in salts))})",
            param="path",
        )
    for _ in read_blocks(file, head):
        pass


def _told(found: T | Exception, path: Path) -> T:
    """The result, or what went wrong with the file, said to whoever asked."""
    if isinstance(found, OSError):
        raise InvalidRequest(f"{path}: {found.strerror}", param="path")
    if isinstance(found, ServingError):
        raise found
    if isinstance(found, Exception):
        raise NotFound(f"a block of the prefix cannot be read: {found}", param="hashes")
    return found


class _Forget:
    """One call of `forget`, with its arguments."""

    def __init__(self, what: dict[str, Any]) -> None:
        self._what = what

    def __call__(self, store: "SegmentStore") -> int:
        return store.forget(**self._what)


def _chosen(request: ForgetRequest) -> Iterator[dict[str, Any]]:
    if request.is_all:
        yield {"everything": True}
    if request.tenant is not None:
        yield {"tenant": tenant_digest(request.tenant).hex()}
    if request.hashes:
        hashes = hashes_of(request.salt or "any", request.hashes)
        yield {"salt": request.salt or None, "hashes": hashes}
    elif request.salt:
        yield {"salt": request.salt}
