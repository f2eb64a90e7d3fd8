"""The file tier for the event loop: every call in a worker thread, with a deadline and a bound.

Off (`cache_dir` empty) or failing, it answers that it holds nothing. It knows by itself what is in
the files, so that a look-up touches no disk.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
from anyio import CapacityLimiter, to_thread

from finback.services.cache.tier_health import TierHealth
from finback.shared.actor.service import Service
from finback.shared.clock import monotonic_s
from finback.shared.config import StackConfig
from finback.shared.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from finback.shared.kv.cluster_key import cluster_key
from finback.shared.telemetry.metrics import Metrics

if TYPE_CHECKING:
    # Here, as it costs 10 MB that nobody needs without files.
    from finback.services.cache.segments.store import SegmentStore

T = TypeVar("T")
Pins = Mapping[str, tuple[str, tuple[bytes, ...]]]  # name -> (salt, hashes)
OnRemoved = Callable[[str, list[bytes]], None]
MakeStore = Callable[[StackConfig, Metrics, Any, OnRemoved, OnRemoved], "SegmentStore"]

THREADS: Final = 4
CALL_S: Final = 10.0
_OPEN_S: Final = 120.0  # it may have to scan
_UPKEEP_EVERY_S: Final = 5.0
# Names of blocks in files that are remembered here, 150 bytes each; more are not told to routers.
MAX_NAMES: Final = 200_000


class FileTier:
    """One `SegmentStore`, asked from the event loop."""

    def __init__(
        self,
        service: Service,
        *,
        on_change: Callable[[str, Sequence[bytes], bool], None],
        take_pins: Callable[[Pins], Pins] = lambda _: {},
        make: "MakeStore | None" = None,
    ) -> None:
        """`on_change(salt, hashes, is_there)` is told on the event loop.

        `take_pins` is told what is pinned in the files, and returns what else is to be.
        """
        self._service = service
        self._config = service.config
        self._on_change = on_change
        self._take_pins = take_pins
        self._make = make or _segment_store
        self._store: SegmentStore | None = None
        self._limiter = CapacityLimiter(THREADS)
        self._names: dict[str, set[bytes]] = {}
        self._num_names = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self.health = TierHealth()

    # --- life

    async def start(self) -> None:
        """Open it in the background, and look after it."""
        self._loop = asyncio.get_running_loop()
        if self._config.cache_dir:
            self.health.state = "opening"
            self._service.spawn(self._upkeep)

    async def stop(self) -> None:
        """Finish the files."""
        store, self._store = self._store, None
        self.health.state = "off"
        if store is not None:
            with anyio.move_on_after(CALL_S, shield=True):
                await to_thread.run_sync(store.close, abandon_on_cancel=True)

    @property
    def is_usable(self) -> bool:
        """Whether it may be asked now."""
        return self._store is not None and self.health.may_try(monotonic_s())

    async def call(
        self, ask: "Callable[[SegmentStore], T]", *, timeout_s: float = CALL_S
    ) -> T | None:
        """Ask in a worker thread; None if the tier is off, rests, is late or fails."""
        store = self._store
        if store is None or not self.is_usable:
            return None
        try:
            with anyio.fail_after(timeout_s):
                found = await to_thread.run_sync(
                    ask, store, abandon_on_cancel=True, limiter=self._limiter
                )
        except (InvalidRequest, NotFound):
            raise
        except TimeoutError:
            self._failed(f"no answer within {timeout_s:g} s")
        except Unavailable as error:
            self._failed(error.public_message)
        except _faults() as error:
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._worked()
            return found
        return None

    # --- what is in it

    def holds(self, salt: str, digest: bytes) -> bool:
        """Whether the block is in the files, and they may be asked."""
        return digest in self._names.get(salt, ()) and self.is_usable

    def names(self) -> Iterator[tuple[str, set[bytes]]]:
        """(salt, hashes) of what is in the files."""
        yield from self._names.items()

    def stored(self, salt: str, hashes: Sequence[bytes]) -> None:
        """Blocks came into the files."""
        if self._num_names + len(hashes) > MAX_NAMES:
            return
        known = self._names.setdefault(salt, set())
        fresh = [digest for digest in hashes if digest not in known]
        known.update(fresh)
        self._num_names += len(fresh)
        if fresh:
            self._on_change(salt, fresh, True)

    def gone(self, salt: str, hashes: Sequence[bytes]) -> None:
        """Blocks are in the files no more."""
        known = self._names.get(salt, set())
        lost = [digest for digest in hashes if digest in known]
        known.difference_update(lost)
        self._num_names -= len(lost)
        if lost:
            self._on_change(salt, lost, False)

    # --- inside

    async def _open(self) -> None:
        try:
            with anyio.fail_after(_OPEN_S):
                await to_thread.run_sync(
                    self._open_now, abandon_on_cancel=True, limiter=self._limiter
                )
        except ConfigError as error:
            self._failed(str(error))
        except _faults() as error:
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._worked()
            await self._learn_names()
            await self._share_pins()
            self._service.log.info(
                "file tier", folder=self._config.cache_dir, num_blocks=self._num_names
            )

    def _open_now(self) -> None:
        service = self._service
        store = self._make(self._config, service.metrics, service.log, self._removed, self._found)
        store.open()
        self._store = store

    async def _learn_names(self) -> None:
        def ask(store: "SegmentStore") -> dict[str, list[bytes]]:
            found: dict[str, list[bytes]] = {}
            for record, _ in zip(store.records(), range(MAX_NAMES), strict=False):
                found.setdefault(record.salt, []).append(record.hash)
            return found

        for salt, hashes in (await self.call(ask, timeout_s=_OPEN_S) or {}).items():
            self.stored(salt, hashes)

    async def _share_pins(self) -> None:
        """What either tier has pinned, both have: memory may have been lost, or files been off."""
        in_files = await self.call(lambda store: store.pins()) or {}
        for name, (salt, hashes) in self._take_pins(in_files).items():
            await self.call(_Pin(name, salt, hashes))

    async def _upkeep(self) -> None:
        while self.health.state != "off":
            if self._store is not None:
                swept = await self.call(lambda store: store.sweep(), timeout_s=_OPEN_S)
                if swept is not None and swept.is_folder_gone:
                    await self._begin_anew()
            elif self.health.may_try(monotonic_s()):
                await self._open()
            await anyio.sleep(_UPKEEP_EVERY_S)

    async def _begin_anew(self) -> None:
        """Somebody removed the folder: nothing is in the files, and they are opened again soon."""
        store, self._store = self._store, None
        for salt, hashes in list(self._names.items()):
            self.gone(salt, list(hashes))
        self._failed("its folder was removed")
        if store is not None:
            with anyio.move_on_after(CALL_S):
                await to_thread.run_sync(store.close, abandon_on_cancel=True)

    def _found(self, salt: str, hashes: list[bytes]) -> None:
        """Told by the store, in a worker thread: these blocks can be read."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stored, salt, hashes)

    def _removed(self, salt: str, hashes: list[bytes]) -> None:
        """Told by the store, in a worker thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.gone, salt, hashes)

    def _worked(self) -> None:
        if self.health.worked():
            self._service.log.info("the file tier is used", folder=self._config.cache_dir)
            self._service.metrics.gauge("finback.cache.file_tier_up", 1)

    def _failed(self, why: str) -> None:
        self._service.metrics.count("finback.cache.file_failures")
        self._service.metrics.gauge("finback.cache.file_tier_up", 0)
        if self.health.failed(why, monotonic_s()):
            self._service.log.warning(
                "the file tier failed, it is left alone for a while",
                folder=self._config.cache_dir,
                error=why,
            )


def _faults() -> tuple[type[Exception], ...]:
    """What disks, files and a full memory do; anything else is a bug, and not hidden."""
    from finback.services.cache.segments.database import IndexDamaged
    from finback.services.cache.segments.record import Miss

    return (OSError, MemoryError, IndexDamaged, Miss)


class _Pin:
    """One call of `pin`, with its arguments."""

    def __init__(self, name: str, salt: str, hashes: Sequence[bytes]) -> None:
        self._arguments = name, salt, hashes

    def __call__(self, store: "SegmentStore") -> None:
        store.pin(*self._arguments)


def _segment_store(
    config: StackConfig, metrics: Metrics, log: Any, on_removed: OnRemoved, on_found: OnRemoved
) -> "SegmentStore":
    # Here, as it costs 10 MB that nobody needs without files.
    from finback.services.cache.segments.store import SegmentStore

    return SegmentStore(
        config.cache_dir,
        max_bytes=config.cache_dir_bytes,
        cluster_key=cluster_key(config),
        writer=config.cache_dir_writer,
        tenant_bytes=config.cache_dir_tenant_bytes,
        compress=config.cache_dir_compress,
        encrypt=config.cache_dir_encrypt,
        read_others=config.cache_dir_shared,
        log=log,
        count=metrics.count,
        on_removed=on_removed,
        on_found=on_found,
    )
