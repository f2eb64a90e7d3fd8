"""One publisher's blocks as a listener knows them: gaps, snapshots, epochs. Pure.

Events are applied in the order of their numbers. Whoever misses one, or has only begun to listen,
asks for a snapshot page by page while events go on arriving: those are kept, and told again on top
of the finished snapshot. A page may be newer than its number says; the events behind it then say
the same again, and the last word on a block is the true one. Until the new view is whole the old
one stays in use.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from finback.shared.kv.block_hash import HASH_BYTES
from finback.shared.wire.messages.kv import KvEvents, KvSnapshotReply

GRACE_S: Final = 0.05
"""A missing number may still come."""
ANSWER_S: Final = 3.0  # for one page
BACKOFF_S: Final = (0.1, 5.0)
MAX_FAILURES: Final = 8
"""In a row; then nothing is asked until the publisher is heard again."""
MAX_ABSENCES: Final = 3
"""The same where nobody answers at all: an instance that tells nothing of its blocks."""
MAX_KEPT: Final = 2_048  # events kept while a snapshot is fetched
MAX_KEPT_BLOCKS: Final = 262_144  # in these events


class BlockView(Protocol):
    """What one instance holds. A view counts from `activate` on; hashes are joined."""

    def store(self, salt: str, tier: str, hashes: bytes) -> None: ...

    def remove(self, salt: str, tier: str, hashes: bytes) -> None: ...

    def clear(self) -> None: ...

    def activate(self) -> None: ...

    def drop(self) -> None:
        """The view is not needed any more; nothing follows."""


OpenView = Callable[[str], BlockView]
"""An empty view of this instance that does not count yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A page to fetch; the answer is given back with the same `token`."""

    token: int
    service: str
    instance: str
    epoch: int
    cursor: str


@dataclass(slots=True, kw_only=True)
class _Fetch:
    """A snapshot on its way. `first_seq`: of its first page; None: not there yet."""

    due_s: float
    is_forced: bool
    cursor: str = ""
    first_seq: int | None = None
    view: BlockView | None = None
    token: int = 0  # of the question that is open; 0: none is
    until_s: float = 0.0
    num_failures: int = 0
    num_page_failures: int = 0


@dataclass(slots=True)
class FollowCounts:
    """What has happened, for metrics."""

    num_events: int = 0
    num_duplicates: int = 0
    num_gaps: int = 0
    num_snapshots: int = 0
    num_failures: int = 0
    num_malformed: int = 0
    num_restarts: int = 0


@dataclass(slots=True)
class KvFollower:
    """Feed it with `hear`, `answer`, `fail`; ask it for the next `Ask`."""

    service: str
    instance: str
    epoch: int
    open_view: OpenView
    now_s: float
    seq: int = -1
    is_synced: bool = False
    heard_s: float = 0.0
    counts: FollowCounts = field(default_factory=FollowCounts)
    _view: BlockView | None = None
    _fetch: _Fetch | None = None
    _kept: dict[int, KvEvents] = field(default_factory=dict)
    _num_kept_blocks: int = 0
    _last_token: int = 0

    def __post_init__(self) -> None:
        self.heard_s = self.now_s
        self._fetch = _Fetch(due_s=self.now_s, is_forced=True)

    @property
    def is_waiting(self) -> bool:
        """Whether its first view is still on its way (and not given up)."""
        return not self.is_synced and self._fetch is not None

    @property
    def due_s(self) -> float | None:
        """When there is something to ask (or to give up waiting for); None: no time is known."""
        fetch = self._fetch
        if fetch is None:
            return None
        return fetch.until_s if fetch.token else fetch.due_s

    def hear(self, event: KvEvents, now_s: float) -> None:
        """An event, in whatever order and however often it comes."""
        if len(event.stored) % HASH_BYTES or len(event.removed) % HASH_BYTES:
            self.counts.num_malformed += 1
            return  # its number is missing then
        if event.epoch < self.epoch:
            self.counts.num_duplicates += 1
            return
        self.service = event.service
        if event.epoch > self.epoch:
            self._begin_anew(event.epoch, now_s)
        self.heard_s = now_s
        self.counts.num_events += 1
        if self._fetch is None and not self.is_synced:
            self._fetch = _Fetch(due_s=now_s, is_forced=True)  # given up before
        if event.seq <= self.seq:
            self.counts.num_duplicates += 1
        elif self._fetch is None and event.seq == self.seq + 1:
            self._apply(event)
        else:
            self._keep(event)
            self._close_gap(now_s)

    def resync(self, now_s: float) -> None:
        """Messages may have been lost: have a fresh snapshot."""
        if self._fetch is None:
            self._fetch = _Fetch(due_s=now_s, is_forced=True)
        else:
            self._fetch.is_forced = True

    def ask(self, now_s: float) -> Ask | None:
        """The page to ask for now, if one is due; an answer that never came counts as failed."""
        fetch = self._fetch
        if fetch is not None and fetch.token and now_s >= fetch.until_s:
            self.fail(fetch.token, now_s)
            fetch = self._fetch
        if fetch is None or fetch.token or now_s < fetch.due_s:
            return None
        self._last_token += 1
        fetch.token, fetch.until_s = self._last_token, now_s + ANSWER_S
        return Ask(
            token=fetch.token,
            service=self.service,
            instance=self.instance,
            epoch=self.epoch,
            cursor=fetch.cursor,
        )

    def answer(self, token: int, reply: KvSnapshotReply, now_s: float) -> None:
        """A page has come."""
        fetch = self._fetch
        if fetch is None or fetch.token != token:
            return
        if reply.epoch != self.epoch or any(len(h.hashes) % HASH_BYTES for h in reply.holdings):
            if reply.epoch > self.epoch:
                self._begin_anew(reply.epoch, now_s)
            else:
                self.fail(token, now_s, is_cursor_gone=True)
            return
        fetch.token, fetch.num_failures, fetch.num_page_failures = 0, 0, 0
        fetch.due_s = now_s
        if fetch.view is None or fetch.first_seq is None:
            fetch.view, fetch.first_seq = self.open_view(self.instance), reply.seq
        for part in reply.holdings:
            fetch.view.store(part.salt, part.tier, part.hashes)
        fetch.cursor = reply.next_cursor
        if not reply.next_cursor:
            self._finish(fetch.view, fetch.first_seq, now_s)

    def fail(
        self, token: int, now_s: float, *, is_cursor_gone: bool = False, is_absent: bool = False
    ) -> None:
        """A page did not come; it is asked for again, or the snapshot is begun anew."""
        fetch = self._fetch
        if fetch is None or fetch.token != token:
            return
        self.counts.num_failures += 1
        fetch.token = 0
        fetch.num_failures += 1
        fetch.num_page_failures += 1
        low, high = BACKOFF_S
        fetch.due_s = now_s + min(high, low * 2 ** (fetch.num_failures - 1))
        if is_cursor_gone or fetch.num_page_failures > 1:
            self._drop_staged()
            fetch.cursor, fetch.first_seq, fetch.num_page_failures = "", None, 0
        if fetch.num_failures >= (MAX_ABSENCES if is_absent else MAX_FAILURES):
            self._drop_staged()
            self._fetch = None
            self.is_synced = False
            self._forget_kept()
            self.seq = -1

    def close(self) -> None:
        """The instance is gone, and what it held."""
        self._drop_staged()
        self._fetch = None
        if self._view is not None:
            self._view.drop()
            self._view = None
        self._forget_kept()

    # -- inside

    def _begin_anew(self, epoch: int, now_s: float) -> None:
        self.close()
        self.counts.num_restarts += 1
        self.epoch, self.seq, self.is_synced = epoch, -1, False
        self._fetch = _Fetch(due_s=now_s, is_forced=True)

    def _close_gap(self, now_s: float) -> None:
        """Apply what is in order; ask for a snapshot if a number is missing."""
        if self.is_synced:
            self._drain()
            if self._fetch is not None and not self._fetch.is_forced and self._is_contiguous():
                self._drop_staged()
                self._fetch = None
                self._forget_kept()
        if self._fetch is None and self._kept:
            self.counts.num_gaps += 1
            self._fetch = _Fetch(due_s=now_s + GRACE_S, is_forced=False)

    def _finish(self, view: BlockView, first_seq: int, now_s: float) -> None:
        """The new view replaces the old one, and what was kept is told again on top of it."""
        self.counts.num_snapshots += 1
        old, self._view = self._view, view
        view.activate()
        if old is not None:
            old.drop()
        self._fetch, self.is_synced, self.seq = None, True, first_seq
        self._drain()
        if self._is_contiguous():
            self._forget_kept()
        else:
            self._kept = {seq: e for seq, e in self._kept.items() if seq > self.seq}
            self._num_kept_blocks = sum(map(_num_blocks, self._kept.values()))
            self._close_gap(now_s)

    def _drain(self) -> None:
        while (event := self._kept.get(self.seq + 1)) is not None:
            self._apply(event)

    def _is_contiguous(self) -> bool:
        return not self._kept or max(self._kept) <= self.seq

    def _apply(self, event: KvEvents) -> None:
        self.seq = event.seq
        view = self._view
        if view is None:
            return
        if event.is_reset:
            view.clear()
        if event.removed:
            view.remove(event.salt, event.tier, event.removed)
        if event.stored:
            view.store(event.salt, event.tier, event.stored)

    def _keep(self, event: KvEvents) -> None:
        if event.seq in self._kept:
            return
        self._kept[event.seq] = event
        self._num_kept_blocks += _num_blocks(event)
        if len(self._kept) > MAX_KEPT or self._num_kept_blocks > MAX_KEPT_BLOCKS:
            # The hole that this leaves is found when the snapshot is there.
            self._forget_kept()
            self._kept[event.seq] = event
            self._num_kept_blocks = _num_blocks(event)

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._num_kept_blocks = 0

    def _drop_staged(self) -> None:
        fetch = self._fetch
        if fetch is not None and fetch.view is not None:
            fetch.view.drop()
            fetch.view = None


def _num_blocks(event: KvEvents) -> int:
    return (len(event.stored) + len(event.removed)) // HASH_BYTES
