"""A listener's view against the truth, over a network that loses, repeats, delays and reorders."""

import dataclasses
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from finback.shared.errors import ServingError
from finback.shared.kv import kv_follower
from finback.shared.kv.kv_follower import Ask, KvFollower
from finback.shared.kv.kv_journal import KvJournal, SnapshotDesk, split
from finback.shared.wire.messages.kv import KvEvents, KvSnapshotReply, KvSnapshotRequest

Block = tuple[str, str, bytes]
SALTS, TIERS = ("s", "t"), ("host", "file")


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


class SetView:
    """A view as a plain set; keeps book of all that were opened."""

    def __init__(self) -> None:
        self.blocks: set[Block] = set()
        self.is_active = self.is_dropped = False

    def store(self, salt: str, tier: str, hashes: bytes) -> None:
        assert not self.is_dropped
        self.blocks |= {(salt, tier, h) for h in split(hashes)}

    def remove(self, salt: str, tier: str, hashes: bytes) -> None:
        assert not self.is_dropped
        self.blocks -= {(salt, tier, h) for h in split(hashes)}

    def clear(self) -> None:
        self.blocks.clear()

    def activate(self) -> None:
        self.is_active = True

    def drop(self) -> None:
        assert not self.is_dropped
        self.is_dropped = True


class Publisher:
    """One life of an instance: what it holds, its journal, its snapshots."""

    def __init__(self, epoch: int, held: Iterable[Block] = ()) -> None:
        self.epoch = epoch
        self.held: set[Block] = set(held)
        self.journal = KvJournal(service="cache", instance="c", epoch=epoch, max_pending=8)
        self.desk = SnapshotDesk(epoch=epoch)

    def answer(self, ask: Ask) -> KvSnapshotReply | None:
        """None: it does not answer so."""
        holdings = [
            (s, t, sorted(h for a, b, h in self.held if (a, b) == (s, t)))
            for s in SALTS
            for t in TIERS
        ]
        request = KvSnapshotRequest(cursor=ask.cursor, max_blocks=2)
        try:
            return self.desk.answer(request, holdings, self.journal.seq, 0.0)
        except ServingError:
            return None


RARELY = st.integers(0, 7).map(lambda n: n == 0)


class Network(RuleBasedStateMachine):
    """A publisher that changes and crashes, messages on their way, and a follower."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.opened: list[SetView] = []
        self.publisher = Publisher(1)
        self.flying: list[KvEvents] = []
        self.asks: list[Ask] = []
        self.replies: list[tuple[int, KvSnapshotReply]] = []
        self.follower = KvFollower(
            service="cache", instance="c", epoch=0, open_view=self.open_view, now_s=0.0
        )

    def open_view(self, instance: str) -> SetView:
        self.opened.append(SetView())
        return self.opened[-1]

    @rule(
        salt=st.sampled_from(SALTS),
        tier=st.sampled_from(TIERS),
        numbers=st.lists(st.integers(0, 9), max_size=10),
        is_stored=st.booleans(),
    )
    def change(self, salt: str, tier: str, numbers: list[int], is_stored: bool) -> None:
        hashes = [name(n) for n in numbers]
        blocks = {(salt, tier, h) for h in hashes}
        if is_stored:
            self.publisher.held |= blocks
            self.publisher.journal.stored(salt, tier, hashes)
        else:
            self.publisher.held -= blocks
            self.publisher.journal.removed(salt, tier, hashes)

    @rule(is_now=RARELY)
    def reset(self, is_now: bool) -> None:
        if not is_now:
            return
        self.publisher.held.clear()
        self.publisher.journal.reset()

    @rule()
    def flush(self) -> None:
        self.flying += self.publisher.journal.take()

    @rule()
    def beat(self) -> None:
        self.flying.append(self.publisher.journal.beat())

    @rule(is_kept=st.booleans(), is_now=RARELY)
    def crash(self, is_kept: bool, is_now: bool) -> None:
        if not is_now:
            return
        self.publisher = Publisher(
            self.publisher.epoch + 1, self.publisher.held if is_kept else set()
        )

    @rule(data=st.data(), is_lost=RARELY, is_repeated=RARELY)
    def deliver(self, data: st.DataObject, is_lost: bool, is_repeated: bool) -> None:
        if not self.flying:
            return
        at = data.draw(st.sampled_from([0, 0, 0, 1, 2]))
        event = self.flying.pop(min(at, len(self.flying) - 1))
        if is_repeated:
            self.flying.append(event)
        if not is_lost:
            self.follower.hear(event, self.now_s)

    @rule(step_s=st.sampled_from([0.0, 0.06, 0.5, 4.0]))
    def ask(self, step_s: float) -> None:
        self.now_s += step_s
        ask = self.follower.ask(self.now_s)
        if ask is not None:
            self.asks.append(ask)

    @rule(is_lost=RARELY)
    def answer(self, is_lost: bool) -> None:
        if not self.asks:
            return
        ask = self.asks.pop(0)
        reply = self.publisher.answer(ask)
        if reply is None:
            self.follower.fail(ask.token, self.now_s, is_cursor_gone=True)
        elif not is_lost:
            self.replies.append((ask.token, reply))

    @rule()
    def reply(self) -> None:
        if self.replies:
            token, reply = self.replies.pop(0)
            self.follower.answer(token, reply, self.now_s)

    @rule()
    def whole_snapshot(self) -> None:
        """Everything goes well for a while."""
        for _ in range(8):
            self.ask(0.5)
            self.answer(False)
            self.reply()

    @rule(number=st.integers(0, 9), is_stored=st.booleans())
    def change_during_a_snapshot(self, number: int, is_stored: bool) -> None:
        """Its pages are frozen before, its last one comes after."""
        self.follower.resync(self.now_s)
        self.ask(0.5)
        self.answer(False)
        self.change("s", "host", [number], is_stored)
        self.flush()
        self.deliver_in_order(100)
        self.whole_snapshot()

    @rule(count=st.integers(1, 5))
    def deliver_in_order(self, count: int) -> None:
        for event in self.flying[:count]:
            self.follower.hear(event, self.now_s)
        del self.flying[:count]

    @rule(is_forced=RARELY)
    def resync(self, is_forced: bool) -> None:
        if is_forced:
            self.follower.resync(self.now_s)

    @invariant()
    def few_views_are_open(self) -> None:
        if hasattr(self, "opened"):
            assert sum(not view.is_dropped for view in self.opened) <= 2

    @invariant()
    def whoever_has_heard_everything_knows_everything(self) -> None:
        if not hasattr(self, "publisher"):
            return
        follower, publisher = self.follower, self.publisher
        is_current = (follower.epoch, follower.seq) == (publisher.epoch, publisher.journal.seq)
        if follower.is_synced and is_current and publisher.journal.is_empty:
            (view,) = [v for v in self.opened if v.is_active and not v.is_dropped]
            assert view.blocks == publisher.held

    def teardown(self) -> None:
        """Once the network behaves, the view is the truth."""
        if not hasattr(self, "publisher"):
            return
        while self.replies:
            self.reply()
        self.flush()
        self.beat()
        for event in self.flying:
            self.follower.hear(event, self.now_s)
        for _ in range(40):
            self.now_s += 5.0
            ask = self.follower.ask(self.now_s)
            if ask is not None:
                reply = self.publisher.answer(ask)
                if reply is None:
                    self.follower.fail(ask.token, self.now_s, is_cursor_gone=True)
                else:
                    self.follower.answer(ask.token, reply, self.now_s)
        assert self.follower.is_synced
        assert self.follower.epoch == self.publisher.epoch
        assert self.follower.seq == self.publisher.journal.seq
        (view,) = [view for view in self.opened if not view.is_dropped]
        assert view.is_active and view.blocks == self.publisher.held


Network.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestNetwork = Network.TestCase


# -- single cases


def follower(opened: list[SetView]) -> KvFollower:
    def open_view(instance: str) -> SetView:
        opened.append(SetView())
        return opened[-1]

    return KvFollower(service="cache", instance="c", epoch=1, open_view=open_view, now_s=0.0)


def synced(opened: list[SetView], seq: int = 0) -> KvFollower:
    made = follower(opened)
    ask = made.ask(0.0)
    assert ask is not None
    made.answer(ask.token, KvSnapshotReply(epoch=1, seq=seq), 0.0)
    assert made.is_synced
    return made


def event(seq: int, *numbers: int, epoch: int = 1, **more: object) -> KvEvents:
    made = KvEvents(
        service="cache",
        instance="c",
        epoch=epoch,
        seq=seq,
        salt="s",
        tier="host",
        stored=b"".join(map(name, numbers)),
    )
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # named by each test


def test_a_late_event_closes_its_gap_without_a_snapshot() -> None:
    opened: list[SetView] = []
    f = synced(opened)
    f.hear(event(2, 2), 1.0)
    assert f.counts.num_gaps == 1 and f.ask(1.0) is None
    f.hear(event(1, 1), 1.01)
    assert f.due_s is None and f.seq == 2
    assert {h for _, _, h in opened[0].blocks} == {name(1), name(2)}


def test_a_gap_is_asked_about_after_a_moment_and_the_old_view_serves_meanwhile() -> None:
    opened: list[SetView] = []
    f = synced(opened)
    f.hear(event(1, 1), 1.0)
    f.hear(event(3, 3), 1.0)
    ask = f.ask(1.0 + kv_follower.GRACE_S)
    assert ask is not None and f.is_synced
    assert not opened[0].is_dropped and {h for _, _, h in opened[0].blocks} == {name(1)}
    f.hear(event(4, 4), 1.1)
    f.answer(ask.token, KvSnapshotReply(epoch=1, seq=3), 1.2)
    assert opened[0].is_dropped and f.seq == 4


def test_an_older_life_says_nothing_and_a_newer_one_begins_anew() -> None:
    opened: list[SetView] = []
    f = synced(opened)
    f.hear(event(1, 1), 1.0)
    f.hear(event(2, 2, epoch=0), 1.0)
    assert f.seq == 1
    f.hear(event(1, 5, epoch=2), 1.0)
    assert opened[0].is_dropped and not f.is_synced and f.is_waiting
    ask = f.ask(1.0)
    assert ask is not None and ask.epoch == 2
    f.answer(ask.token, KvSnapshotReply(epoch=1, seq=9), 1.0)
    assert not f.is_synced, "the page is of the older life"


def test_nobody_is_asked_forever_until_the_publisher_is_heard() -> None:
    f = follower([])
    now_s, num_asked = 0.0, 0
    for _ in range(100):
        now_s += 3.0
        num_asked += f.ask(now_s) is not None
    assert num_asked == kv_follower.MAX_FAILURES and not f.is_waiting
    f.hear(event(5), now_s)
    assert f.is_waiting and f.ask(now_s) is not None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_follower, "MAX_KEPT", 10)
    opened: list[SetView] = []
    f = follower(opened)
    ask = f.ask(0.0)
    assert ask is not None
    for seq in range(1, 26):
        f.hear(event(seq, seq), 0.0)
        assert len(f._kept) <= 10
    f.answer(ask.token, KvSnapshotReply(epoch=1, seq=0), 0.0)
    assert f.is_synced and f.counts.num_gaps == 1, "the hole is seen"
    ask = f.ask(1.0)
    assert ask is not None
    f.answer(ask.token, KvSnapshotReply(epoch=1, seq=25), 1.0)
    assert f.seq == 25 and f.due_s is None


def test_a_torn_event_counts_as_missing() -> None:
    f = synced([])
    f.hear(event(1, stored=b"xyz"), 1.0)
    assert f.counts.num_malformed == 1 and f.seq == 0
    f.hear(event(2), 1.0)
    assert f.counts.num_gaps == 1
