"""The registry: instances hold leases in a key-value bucket; a directory is one process's view.

It is for discovery, never the only sign of life. Without JetStream everything goes on from the last
view, with a metric and a log line that say so.
"""

import dataclasses
from collections.abc import Callable

import anyio

from finback.shared.actor.kv import Entry, KeyValue, Watch, WrongRevision, heartbeat_s
from finback.shared.clock import monotonic_s
from finback.shared.errors import DeadlineExceeded, ServingError, WireError
from finback.shared.telemetry.logging import get_logger
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire import codec
from finback.shared.wire.messages.control import InstanceRecord

_log = get_logger(__name__)
_RETRY_MIN_S, _RETRY_MAX_S = 0.5, 10.0
_BEATS_MISSED = 2.5  # then the watch is no witness of anybody's death
_BEATS_BROKEN = 6.0  # then it is made anew


def bucket_name(stack_id: str) -> str:
    """The bucket of a stack; several stacks may share one server."""
    return f"finback_{stack_id}_instances"


def key_of(record: InstanceRecord) -> str:
    return f"{record.service}.{record.instance}"


class Registry:
    """This process's own entries: written, renewed each third of the lease, withdrawn."""

    def __init__(self, kv: KeyValue, *, ttl_s: float, metrics: Metrics) -> None:
        self._kv = kv
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._records: dict[str, InstanceRecord] = {}
        self._revisions: dict[str, int] = {}
        self._lock = anyio.Lock()
        self._is_open = False
        self._is_down = False

    async def register(self, record: InstanceRecord) -> None:
        """Hold a lease under `<service>.<instance>`, or replace its record.

        Without JetStream the record is kept and written as soon as that is back.
        """
        self._records[key_of(record)] = record
        await self._write_all()

    async def set_state(self, state: str) -> None:
        """Tell a new lifecycle state in all of this process's entries."""
        for key, record in self._records.items():
            self._records[key] = dataclasses.replace(record, state=state)
        await self._write_all()

    async def unregister(self) -> None:
        """Withdraw all entries."""
        keys, self._records = tuple(self._records), {}
        async with self._lock:
            for key in keys:
                try:
                    await self._kv.delete(key)
                except ServingError as error:
                    _log.warning("cannot withdraw", key=key, error=error.public_message)

    async def renew_forever(self) -> None:
        """Run in the service's task group."""
        while True:
            await anyio.sleep(self._ttl_s / 3)
            await self._write_all()

    async def reregister(self) -> None:
        """Write everything anew: after a reconnect the server may have forgotten the bucket."""
        self._revisions.clear()
        self._is_open = False
        await self._write_all()

    async def _write_all(self) -> None:
        async with self._lock:
            try:
                if not self._is_open:
                    await self._kv.open()
                    self._is_open = True
                for key, record in tuple(self._records.items()):
                    await self._write(key, codec.encode(record))
            except ServingError as error:
                self._down(error)
                return
        if self._is_down:
            self._is_down = False
            _log.warning("registry is back")
        self._metrics.gauge("finback.registry.up", 1)

    async def _write(self, key: str, value: bytes) -> None:
        expected = self._revisions.get(key, 0)
        try:
            self._revisions[key] = await self._kv.put(key, value, expected=expected)
        except WrongRevision:
            # The lease ran out (we were stopped), or the server lost its memory. Names are random
            # a start, so the entry can only be ours.
            self._metrics.count("finback.registry.lease_lost")
            found = await self._kv.get(key)
            expected = found.revision if found else 0
            try:
                self._revisions[key] = await self._kv.put(key, value, expected=expected)
            except WrongRevision:
                self._revisions.pop(key, None)  # the next renewal tries again

    def _down(self, error: ServingError) -> None:
        self._metrics.gauge("finback.registry.up", 0)
        self._metrics.count("finback.registry.errors")
        if not self._is_down:
            _log.error("registry unavailable, going on without", error=error.public_message)
        self._is_down, self._is_open = True, False


@dataclasses.dataclass(slots=True)
class _Seen:
    record: InstanceRecord
    revision: int
    at_s: float


class Directory:
    """Who is there, as the bucket's watch tells. Reads never wait and never fail."""

    def __init__(self, kv: KeyValue, *, ttl_s: float, metrics: Metrics) -> None:
        self._kv = kv
        self._ttl_s = ttl_s
        self._metrics = metrics
        self._seen: dict[str, _Seen] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._changed = anyio.Event()
        self._restart = anyio.Event()
        self._alive_s = monotonic_s()
        self._no_deaths_before_s = 0.0
        self._is_synced = False

    def instances(self, service: str, *, state: str | None = "serving") -> list[InstanceRecord]:
        """Instances of a service (or role) in that state, by name; `state` None means any."""
        found = [seen.record for seen in self._seen.values() if seen.record.service == service]
        return sorted(
            (r for r in found if state is None or r.state == state), key=lambda r: r.instance
        )

    def find(self, instance: str) -> InstanceRecord | None:
        """The record of an instance, whatever its service and state."""
        for seen in self._seen.values():
            if seen.record.instance == instance:
                return seen.record
        return None

    def all(self) -> list[InstanceRecord]:
        return [seen.record for seen in self._seen.values()]

    @property
    def is_synced(self) -> bool:
        """Whether a full view was had at least once."""
        return self._is_synced

    async def wait_for(self, service: str, n: int = 1, *, timeout_s: float) -> list[InstanceRecord]:
        """Wait until `n` instances serve; `DeadlineExceeded` names what is missing."""
        with anyio.move_on_after(timeout_s):
            while len(found := self.instances(service)) < n:
                await self._changed.wait()
            return found
        have = len(self.instances(service))
        raise DeadlineExceeded(f"{have} of {n} {service} instances within {timeout_s:g} s")

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call (without blocking) after every change."""
        self._callbacks.append(callback)

    def forget(self, instance: str) -> None:
        """Drop an instance that is known dead before its lease runs out."""
        gone = [key for key, seen in self._seen.items() if seen.record.instance == instance]
        for key in gone:
            del self._seen[key]
        if gone:
            self._tell()

    async def reconnected(self) -> None:
        """After a reconnect: a fresh watch, and nobody is declared dead for one lease."""
        self._no_deaths_before_s = monotonic_s() + self._ttl_s
        self._restart.set()

    async def watch_forever(self) -> None:
        """Run in the service's task group: keeps a watch alive, sweeps what has run out."""
        retry_s = _RETRY_MIN_S
        while True:
            self._restart = anyio.Event()
            try:
                await self._kv.open()
                watch = await self._kv.watch(self._apply, self._beat)
            except ServingError as error:
                self._metrics.count("finback.directory.errors")
                if retry_s == _RETRY_MIN_S:  # once an outage
                    _log.warning("cannot watch the registry", error=error.public_message)
                with anyio.move_on_after(retry_s):
                    await self._restart.wait()
                retry_s = min(retry_s * 2, _RETRY_MAX_S)
                continue
            retry_s = _RETRY_MIN_S
            self._beat()
            self._is_synced = True
            self._tell()
            await self._sweep_until_broken(watch)

    async def _sweep_until_broken(self, watch: Watch) -> None:
        try:
            while not self._restart.is_set():
                with anyio.move_on_after(self._ttl_s / 3):
                    await self._restart.wait()
                beats = (monotonic_s() - self._alive_s) / heartbeat_s(self._ttl_s)
                if beats > _BEATS_MISSED:
                    self._no_deaths_before_s = monotonic_s() + self._ttl_s
                if beats > _BEATS_BROKEN:
                    self._metrics.count("finback.directory.silences")
                    return
                self._sweep()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1):
                await watch.stop()

    def _beat(self) -> None:
        self._alive_s = monotonic_s()

    def _apply(self, entry: Entry) -> None:
        """Take one entry; the same one again, or an older one, changes nothing."""
        self._beat()
        seen = self._seen.get(entry.key)
        if entry.value is None:
            if seen is not None and entry.revision >= seen.revision:
                del self._seen[entry.key]
                self._tell()
            return
        try:
            record = codec.decode(entry.value, InstanceRecord)
        except WireError as error:
            _log.warning("odd registry entry", key=entry.key, error=error.public_message)
            return
        # A server that lost its memory counts revisions from 1: the watch starts anew then, and
        # a record that is at least as new replaces what we hold.
        self._seen[entry.key] = _Seen(record, entry.revision, monotonic_s())
        if seen is None or seen.record != record:
            self._tell()

    def _sweep(self) -> None:
        """Drop entries whose lease ran out: the server's own markers may be missing."""
        now_s = monotonic_s()
        if now_s < self._no_deaths_before_s:
            return
        limit_s = now_s - self._ttl_s * 1.25
        gone = [key for key, seen in self._seen.items() if seen.at_s < limit_s]
        for key in gone:
            del self._seen[key]
        if gone:
            self._metrics.count("finback.directory.swept", len(gone))
            self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        for callback in self._callbacks:
            callback()
