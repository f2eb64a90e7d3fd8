"""Listens to all publishers of KV blocks and fetches the snapshots that their followers ask for."""

from collections.abc import Iterable
from typing import Final

import anyio

from finback.shared.actor.service import Service
from finback.shared.clock import monotonic_s
from finback.shared.errors import NotFound, ServingError
from finback.shared.kv.kv_events import EVENT, SNAPSHOT
from finback.shared.kv.kv_follower import ANSWER_S, Ask, FollowCounts, KvFollower, OpenView
from finback.shared.wire.messages.control import InstanceLost, InstanceRecord
from finback.shared.wire.messages.kv import KvEvents, KvSnapshotReply, KvSnapshotRequest

SERVICES: Final = ("prefill", "decode", "cache")
MAX_INSTANCES: Final = 4_096
MAX_FETCHES: Final = 4  # at once
PAGE_BLOCKS: Final = 4_096
"""Taken in within about 3 ms, which is how long a page may hold up the event loop."""
SILENCE_S: Final = 30.0
"""A publisher beats every 2 s; after this long its blocks are no hint any more."""
_TICK_S: Final = 0.25
_NEVER_S: Final = float("inf")


class KvSubscriber:
    """One follower an instance. All methods belong to the event loop."""

    def __init__(self, service: Service, open_view: OpenView) -> None:
        self._service = service
        self._open_view = open_view
        self._followers: dict[str, KvFollower] = {}
        self._lost: dict[str, int] = {}  # instance -> epoch that is known dead
        self._registered: set[str] = set()
        self._gone = FollowCounts()  # of followers that were closed
        self._num_open = 0  # pages that are asked for now
        self._wake = anyio.Event()

    async def start(self) -> None:
        """Begin to listen, and to ask those who are there already."""
        service = self._service
        for name in SERVICES:
            await service.listen(service.subjects.event(name, EVENT), KvEvents, self.hear)
        service.context.bus.on_reconnect(self._reconnected)
        service.context.directory.on_change(self._directory_changed)
        self._directory_changed()
        service.spawn(self._run)

    # -- what is known

    @property
    def num_waiting(self) -> int:
        """Instances whose first snapshot is still on its way."""
        return sum(follower.is_waiting for follower in self._followers.values())

    @property
    def num_followed(self) -> int:
        """Instances whose blocks are known, or asked for."""
        return len(self._followers)

    def is_synced(self, instance: str) -> bool:
        """Whether this instance's blocks are known."""
        follower = self._followers.get(instance)
        return follower is not None and follower.is_synced

    def counts(self) -> FollowCounts:
        """Of all followers together, those that are gone included."""
        total = FollowCounts()
        for counts in (self._gone, *(f.counts for f in self._followers.values())):
            _add(total, counts)
        return total

    # -- what is told

    def hear(self, event: KvEvents) -> None:
        """An event of any publisher."""
        now_s = monotonic_s()
        follower = self._follower(event.service, event.instance, event.epoch, now_s)
        if follower is None:
            return
        follower.hear(event, now_s)
        self._wake_if_due(follower, now_s)

    def instance_lost(self, lost: InstanceLost) -> None:
        """Known dead: its blocks are gone, and late events of that life say nothing."""
        self._lost[lost.instance] = max(lost.epoch, self._lost.get(lost.instance, 0))
        while len(self._lost) > MAX_INSTANCES:
            del self._lost[next(iter(self._lost))]
        follower = self._followers.get(lost.instance)
        if follower is not None and follower.epoch <= lost.epoch:
            self._close(lost.instance)

    async def _reconnected(self) -> None:
        now_s = monotonic_s()
        for follower in self._followers.values():
            follower.resync(now_s)
        self._wake.set()

    def _directory_changed(self) -> None:
        records = [r for r in self._service.context.directory.all() if r.service in SERVICES]
        now = {record.instance for record in records}
        for instance in self._registered - now:
            self._close(instance)
        self._registered = now
        self._expect(records)

    def _expect(self, records: Iterable[InstanceRecord]) -> None:
        now_s = monotonic_s()
        for record in records:
            if record.state == "serving" and record.instance not in self._followers:
                name = record.roles[0] if record.roles else record.service
                self._follower(name, record.instance, record.epoch, now_s)
                self._wake.set()

    def _follower(self, service: str, instance: str, epoch: int, now_s: float) -> KvFollower | None:
        if epoch <= self._lost.get(instance, -1):
            return None
        follower = self._followers.get(instance)
        if follower is None and len(self._followers) < MAX_INSTANCES:
            follower = self._followers[instance] = KvFollower(
                service=service,
                instance=instance,
                epoch=epoch,
                open_view=self._open_view,
                now_s=now_s,
            )
        return follower

    def _close(self, instance: str) -> None:
        follower = self._followers.pop(instance, None)
        if follower is not None:
            follower.close()
            _add(self._gone, follower.counts)

    # -- snapshots

    async def _run(self) -> None:
        while True:
            self._wake = anyio.Event()
            now_s = monotonic_s()
            self._drop_silent(now_s)
            for follower in sorted(self._followers.values(), key=_by_due):
                if self._num_open >= MAX_FETCHES or _by_due(follower) > now_s:
                    break
                if (ask := follower.ask(now_s)) is not None:
                    self._num_open += 1
                    self._service.spawn(self._fetch, follower, ask)
            with anyio.move_on_after(self._pause_s(now_s)):
                await self._wake.wait()

    def _drop_silent(self, now_s: float) -> None:
        for instance, follower in tuple(self._followers.items()):
            if now_s - follower.heard_s > SILENCE_S and not follower.is_waiting:
                self._close(instance)

    def _pause_s(self, now_s: float) -> float:
        if self._num_open >= MAX_FETCHES:
            return _TICK_S
        due_s = min(map(_by_due, self._followers.values()), default=_NEVER_S)
        return min(_TICK_S, max(0.001, due_s - now_s))

    def _wake_if_due(self, follower: KvFollower, now_s: float) -> None:
        if follower.due_s is not None and follower.due_s <= now_s:
            self._wake.set()

    async def _fetch(self, follower: KvFollower, ask: Ask) -> None:
        """One page; the follower itself gives up on one that does not come in time."""
        subject = self._service.subjects.instance(ask.service, ask.instance, SNAPSHOT)
        request = KvSnapshotRequest(cursor=ask.cursor, max_blocks=PAGE_BLOCKS)
        try:
            reply = await self._service.client.call(
                subject, request, KvSnapshotReply, timeout_s=ANSWER_S, epoch=ask.epoch
            )
        except ServingError as error:
            follower.fail(
                ask.token,
                monotonic_s(),
                is_cursor_gone=isinstance(error, NotFound),
                is_absent=error.reason == "no_responders",
            )
        else:
            if self._followers.get(ask.instance) is follower:
                follower.answer(ask.token, reply, monotonic_s())
        finally:
            self._num_open -= 1
        self._wake.set()


def _by_due(follower: KvFollower) -> float:
    return _NEVER_S if follower.due_s is None else follower.due_s


def _add(total: FollowCounts, more: FollowCounts) -> None:
    for name in FollowCounts.__slots__:
        setattr(total, name, getattr(total, name) + getattr(more, name))
