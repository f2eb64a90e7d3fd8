"""What a process tells of its blocks: numbering, netting, splitting, overflow, pages."""

import pytest

from finback.shared.errors import InvalidRequest, NotFound
from finback.shared.kv import kv_journal
from finback.shared.kv.kv_journal import KvJournal, SnapshotDesk, split
from finback.shared.wire.messages.kv import KvSnapshotReply, KvSnapshotRequest


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def journal(max_pending: int = 1000) -> KvJournal:
    return KvJournal(service="decode", instance="decode-1", epoch=7, max_pending=max_pending)


def test_the_last_word_on_a_block_is_told_once() -> None:
    told = journal()
    told.stored("s", "device", [block(1), block(2)])
    told.removed("s", "device", [block(1)])
    told.removed("s", "device", [block(3)])
    told.stored("s", "device", [block(3)])
    (event,) = told.take()
    assert (event.seq, event.service, event.instance, event.epoch) == (1, "decode", "decode-1", 7)
    assert split(event.removed) == [block(1)]
    assert split(event.stored) == [block(2), block(3)]
    assert told.is_empty and told.take() == []


def test_a_message_speaks_of_one_salt_and_tier_and_few_blocks() -> None:
    told = journal(max_pending=100_000)
    many = [block(i) for i in range(kv_journal.MAX_HASHES + 1)]
    told.stored("s", "host", many)
    told.stored("s", "file", [block(1)])
    told.stored("t", "host", [block(1)])
    events = told.take()
    assert [(e.seq, e.salt, e.tier, len(split(e.stored))) for e in events] == [
        (1, "s", "host", kv_journal.MAX_HASHES),
        (2, "s", "host", 1),
        (3, "s", "file", 1),
        (4, "t", "host", 1),
    ]


def test_a_reset_forgets_what_waits_and_is_told_with_what_follows() -> None:
    told = journal()
    told.stored("s", "device", [block(1)])
    told.reset()
    told.stored("s", "device", [block(2)])
    (event,) = told.take()
    assert event.is_reset and split(event.stored) == [block(2)] and not event.removed
    told.reset()
    (event,) = told.take()
    assert event.is_reset and event.seq == 2 and not event.stored
    assert not told.beat().is_reset


def test_too_much_to_tell_skips_a_number() -> None:
    told = journal(max_pending=3)
    told.stored("s", "device", [block(i) for i in range(4)])
    assert told.is_empty and told.num_overflows == 1
    told.stored("s", "device", [block(9)])
    (event,) = told.take()
    assert event.seq == 2 and split(event.stored) == [block(9)]


def pages(desk: SnapshotDesk, first: KvSnapshotRequest, blocks: list[bytes]) -> list[bytes]:
    """All blocks of a snapshot, while what is held changes meanwhile."""
    found: list[bytes] = []
    request = first
    held: list[bytes] = list(blocks)
    while True:
        reply: KvSnapshotReply = desk.answer(request, [("s", "host", held)], 5, 1.0)
        assert reply.seq == 5 and reply.epoch == 7
        found += [h for part in reply.holdings for h in split(part.hashes)]
        held = []
        if not reply.next_cursor:
            return found
        request = KvSnapshotRequest(cursor=reply.next_cursor, max_blocks=first.max_blocks)


@pytest.mark.parametrize("num_blocks", [0, 1, 4, 5, 8, 9])
def test_pages_are_of_one_moment(num_blocks: int) -> None:
    blocks = [block(i) for i in range(num_blocks)]
    desk = SnapshotDesk(epoch=7)
    assert pages(desk, KvSnapshotRequest(max_blocks=4), blocks) == blocks


def test_pages_span_salts_and_tiers() -> None:
    desk = SnapshotDesk(epoch=7)
    holdings = [("s", "host", [block(1), block(2)]), ("s", "file", []), ("t", "file", [block(3)])]
    reply = desk.answer(KvSnapshotRequest(), holdings, 5, 1.0)
    assert [(h.salt, h.tier, split(h.hashes)) for h in reply.holdings] == [
        ("s", "host", [block(1), block(2)]),
        ("t", "file", [block(3)]),
    ]
    first = desk.answer(KvSnapshotRequest(max_blocks=1), holdings, 5, 1.0)
    second = desk.answer(
        KvSnapshotRequest(cursor=first.next_cursor, max_blocks=5), holdings, 6, 1.0
    )
    assert second.seq == 5 and [h.salt for h in second.holdings] == ["s", "t"]


def test_few_snapshots_are_open_and_not_for_long() -> None:
    desk = SnapshotDesk(epoch=7)
    holdings = [("s", "host", [block(1), block(2)])]
    cursors = [
        desk.answer(KvSnapshotRequest(max_blocks=1), holdings, 5, 1.0).next_cursor
        for _ in range(kv_journal.MAX_SNAPSHOTS + 1)
    ]
    assert len(desk) == kv_journal.MAX_SNAPSHOTS
    with pytest.raises(NotFound):
        desk.answer(KvSnapshotRequest(cursor=cursors[0]), holdings, 5, 1.0)
    desk.sweep(1.0 + kv_journal.SNAPSHOT_LIFE_S + 1)
    assert len(desk) == 0


@pytest.mark.parametrize("cursor", ["x", "x:", "x:-1", "x:" + "9" * 40, ":" * 3])
def test_an_odd_cursor_is_refused(cursor: str) -> None:
    with pytest.raises((InvalidRequest, NotFound)):
        SnapshotDesk(epoch=7).answer(KvSnapshotRequest(cursor=cursor), [], 5, 1.0)


def test_a_torn_list_of_hashes_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        split(b"x" * 33)
