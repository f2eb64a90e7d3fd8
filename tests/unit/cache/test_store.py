"""Blocks stored in the arena: found again, held, expired, given up, restarted over."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finback.services.cache.retention import Retention
from finback.services.cache.store_policy import StorePolicy
from finback.shared.errors import InvalidRequest, NotFound, Unavailable
from finback.shared.lanes.arena_format import SlotState, table_offset
from finback.shared.wire.messages.cache import ReserveRequest
from support.kv_store import BLOCK, SLOT, StoreRig, digest, joined, payload

Make = Callable[..., StoreRig]
DAY = 86_400.0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[StoreRig] = []

    def made(**settings: Any) -> StoreRig:
        rigs.append(StoreRig(tmp_path / f"arena-{len(rigs)}", **settings))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.arena.check_integrity()
        rig.close()


def test_a_stored_block_is_found_and_outlives_its_lease(make: Make) -> None:
    rig = make()
    names = ["a", "b", "c"]
    reply = rig.ask(names)
    assert reply.indexes == (0, 1, 2)
    assert rig.read(names) == ([], "busy"), "it is being written"
    rig.fill(names, reply)
    assert rig.read(names) == ([payload(name) for name in names], "")
    rig.arena.release((reply.lease_id,))
    rig.sleep(3600)
    rig.arena.expire(rig.mono_s, lambda owner, epoch: False)
    assert rig.read([*names, "d"]) == ([payload(name) for name in names], "absent")
    assert rig.keep([*names, "d"]) == [3], "the others are kept already"
    assert rig.arena.counts().num_kept == 4
    assert rig.arena.counts().num_leases == 0


def test_it_survives_a_restart(make: Make) -> None:
    rig = make()
    rig.keep(["a", "b"], traffic_class="agent", tenant="t")
    open_ = rig.ask(["c"])
    rig.restart()
    rig.arena.check_integrity()
    assert rig.held(["a", "b", "c"]) == ["a", "b"]
    rig.fill(["c"], open_)
    assert rig.held(["a", "b", "c"]) == ["a", "b", "c"]
    rig.sleep(3 * DAY + 1)
    assert rig.read(["a"]) == ([], "expired")
    assert rig.held(["c"]) == ["c"]


def test_names_of_other_salts_and_kinds_are_others(make: Make) -> None:
    rig = make()
    rig.keep(["a"])
    assert rig.read(["a"], salt="0b" * 16) == ([], "absent")
    assert rig.read(["a"], kind="state") == ([], "absent")
    assert rig.keep(["a"], kind="state") == [0]


def test_asking_again_under_the_same_lease_is_harmless(make: Make) -> None:
    rig = make()
    first = rig.ask(["a", "b"])
    again = rig.ask(["a", "b", "c"], first.lease_id)
    assert again.slots[:2] == first.slots
    assert again.indexes == (0, 1, 2)
    assert rig.ask(["a", "b"]).slots == (), "somebody else writes them"
    rig.fill(["a", "b", "c"], again)
    rig.fill(["a", "b", "c"], again)
    assert rig.arena.counts().num_kept == 3


def test_a_read_lease_keeps_the_slot_while_everything_is_given_up(make: Make) -> None:
    rig = make(max_bytes=1 << 17)
    rig.keep(["a"])
    lease_id = rig.lease()
    assert rig.pin(["a"], lease_id)[1] == ""
    ticket = rig.arena.ticket(next(iter(rig.arena.book.index.items()))[1])
    for number in range(60):
        rig.sleep(1)
        assert rig.arena.renew((lease_id,), rig.mono_s) == [lease_id]
        rig.keep([number])
        assert rig.read(["a"])[0] == [payload("a")]
    key = rig.store.arena.book.index.pool(*("5a" * 16, 0))[digest("a")]
    rig.store.give_up([key], "forgotten")
    assert rig.read(["a"]) == ([], "evicted")
    assert rig.arena.book.header(key).generation == ticket.generation
    assert rig.arena.book.header(key).state is SlotState.COMMITTED
    rig.arena.check_integrity()
    rig.arena.release((lease_id,))
    assert rig.arena.book.header(key).state is SlotState.FREE


def test_a_full_arena_gives_up_batch_then_chat_then_agent(make: Make) -> None:
    rig = make(max_bytes=1 << 17)
    capacity = len(rig.keep(list(range(100)), traffic_class="batch"))
    assert 10 < capacity < 16
    assert rig.keep(["x"], traffic_class="batch") == [0]
    third = capacity // 3
    for class_ in ("agent", "chat", "batch"):
        rig.sleep(1)
        for number in range(third):
            rig.keep([f"{class_}{number}"], traffic_class=class_)
    held = {c: rig.held([f"{c}{n}" for n in range(third)]) for c in ("agent", "chat", "batch")}
    assert all(len(names) == third for names in held.values())
    for number in range(capacity - 2 * third):
        rig.keep([f"new{number}"], traffic_class="agent")
    assert rig.held([f"batch{n}" for n in range(third)]) == []
    assert len(rig.held([f"chat{n}" for n in range(third)])) == third
    assert rig.keep(["late"], traffic_class="batch") == [], "batch pushes nobody out"


def test_the_end_of_a_prefix_goes_before_its_beginning(make: Make) -> None:
    rig = make(max_bytes=1 << 17)
    names = [f"p{number}" for number in range(10)]
    rig.keep(names)
    rig.sleep(1)
    rig.keep([f"q{number}" for number in range(8)])
    held = rig.held(names)
    assert held == names[: len(held)] and 0 < len(held) < 10


def test_an_arena_too_small_for_one_prompt_keeps_its_beginning(make: Make) -> None:
    rig = make(max_bytes=1 << 17)
    lease_id = rig.lease()
    kept = 0
    for start in range(0, 64, 8):
        names = [f"p{number}" for number in range(start, start + 8)]
        reply = rig.ask(names, lease_id, first_block=start)
        assert reply.indexes == tuple(range(len(reply.slots)))
        if reply.slots:
            rig.fill(names, reply)
        kept += len(reply.slots)
    assert rig.held([f"p{number}" for number in range(64)]) == [f"p{n}" for n in range(kept)]
    rig.arena.release((lease_id,))


def test_handing_over_goes_before_keeping(make: Make) -> None:
    rig = make(max_bytes=1 << 17)
    rig.keep(list(range(100)))
    for num_bytes in (BLOCK, 100, 20_000):
        request = ReserveRequest(
            request_id="r", owner="prefill-a", owner_epoch=5, num_blocks=2, block_bytes=num_bytes
        )
        reply = rig.arena.reserve(request, rig.mono_s)
        assert len(reply.slots) == 2
        assert all(slot.length == num_bytes for slot in reply.slots)
        rig.arena.check_integrity()
        rig.arena.release((reply.lease_id,))


def test_blocks_of_another_size_take_the_place_of_a_model_that_is_gone(make: Make) -> None:
    rig = make(max_bytes=1 << 19)
    rig.keep([f"old{number}" for number in range(100)])
    for number in range(400):
        rig.sleep(1)
        rig.keep([f"new{number}"], payload_bytes=3 * BLOCK)
    held = rig.held([f"old{number}" for number in range(100)])
    assert len(held) < 20
    assert len(rig.held([f"new{number}" for number in range(400)])) > 15


def test_a_full_file_system_makes_older_blocks_go(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    rig.keep(list(range(10)))

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    rig.sleep(1)
    for number in range(10, 60):
        assert rig.keep([number]) == [0]
    assert rig.held([0]) == [] and rig.held([59]) == [59]


def test_a_tenant_over_its_quota_loses_its_own_oldest(make: Make) -> None:
    rig = make(policy=StorePolicy(tenant_bytes=4 * SLOT))
    rig.keep(["other"], tenant="b")
    for name in "abcdef":
        rig.sleep(1)
        rig.keep([name], tenant="a", traffic_class="agent")
    assert rig.held([*"abcdef", "other"]) == [*"cdef", "other"]
    assert len(rig.keep(list("ghijklm"), tenant="a")) == 4
    assert rig.held(["other"]) == ["other"]


def test_states_have_a_budget_and_a_time_of_their_own(make: Make) -> None:
    rig = make(policy=StorePolicy(state_bytes=2 * SLOT), max_bytes=1 << 17)
    rig.keep(list(range(100)))
    for name in ("s1", "s2", "s3"):
        rig.sleep(1)
        assert rig.keep([name], kind="state") == [0]
    assert rig.read(["s1"], kind="state") == ([], "evicted")
    rig.keep(list(range(200, 300)))
    assert rig.read(["s2"], kind="state")[0] and rig.read(["s3"], kind="state")[0]
    rig.sleep(181)
    assert rig.read(["s3"], kind="state") == ([], "expired")
    assert rig.store.sweep(rig.now) == 2


def test_reading_renews_the_time(make: Make) -> None:
    rig = make()
    rig.keep(["a", "b"])
    for _ in range(4):
        rig.sleep(5 * DAY)
        assert rig.read(["a"])[1] == ""
    assert rig.read(["b"]) == ([], "expired")
    assert rig.store.sweep(rig.now) == 1


def test_a_request_may_ask_for_a_time_within_bounds(make: Make) -> None:
    rig = make(policy=StorePolicy(retention=Retention(max_s=100)))
    rig.keep(["a"], retention_s=10)
    rig.keep(["b"], retention_s=1e9)
    rig.sleep(11)
    assert rig.held(["a", "b"]) == ["b"]
    rig.sleep(101)
    assert rig.held(["a", "b"]) == []
    with pytest.raises(InvalidRequest) as caught:
        rig.keep(["c"], retention_s=float("nan"))
    assert caught.value.param == "retention_s"


def test_a_clock_that_jumps_frees_nothing_that_is_leased(make: Make) -> None:
    rig = make()
    rig.keep(["a"])
    lease_id = rig.lease()
    rig.pin(["a"], lease_id)
    rig.wall_s += 1000 * DAY
    assert rig.store.sweep(rig.now) == 0
    assert rig.arena.renew((lease_id,), rig.mono_s) == [lease_id]
    rig.wall_s -= 2000 * DAY
    rig.store.clock_went_back(rig.now)
    rig.arena.check_integrity()
    rig.arena.release((lease_id,))
    assert rig.held(["a"]) == ["a"]
    rig.sleep(8 * DAY)
    assert rig.held(["a"]) == [], "no longer than its time from now on"


def test_what_is_not_worth_keeping_gets_no_slot(make: Make) -> None:
    rig = make(policy=StorePolicy(min_prefix_blocks=3, is_batch_kept=False))
    assert rig.keep(["a", "b"]) == []
    assert rig.keep(["a", "b"], prompt_blocks=3) == [0, 1]
    assert rig.keep(["c"], first_block=2) == [0]
    assert rig.keep(["d", "e", "f"], traffic_class="batch") == []
    assert rig.store.refused == {"short": 2, "class": 3, "full": 0, "quota": 0}
    once = make(policy=StorePolicy(is_kept_on_second_sight=True))
    assert once.keep(["a", "b"]) == []
    assert once.keep(["a", "c"]) == [0]


def test_a_damaged_block_is_dropped_once(make: Make) -> None:
    rig = make()
    rig.keep(["a"])
    key = rig.arena.book.index.pool("5a" * 16, 0)[digest("a")]
    generation = rig.arena.book.header(key).generation
    assert not rig.store.drop_corrupt("5a" * 16, digest("a"), generation + 1)
    assert rig.store.drop_corrupt("5a" * 16, digest("a"), generation)
    assert not rig.store.drop_corrupt("5a" * 16, digest("a"), generation)
    assert rig.read(["a"]) == ([], "corrupt")
    assert rig.keep(["a"]) == [0]
    assert rig.read(["a"])[1] == ""


def test_a_damaged_header_hides_its_block(make: Make) -> None:
    rig = make()
    rig.keep(["a", "b"])
    extent_id, index = rig.arena.book.index.pool("5a" * 16, 0)[digest("a")]
    path = rig.folder / rig.arena.ticket((extent_id, index)).location
    rig.arena.close()
    with open(path, "r+b") as file:
        file.seek(table_offset(index) + 150)  # within the hash
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 4]))
    rig.open()
    assert rig.arena.num_damaged == 1
    assert rig.held(["a", "b"]) == ["b"]


def test_an_expired_lease_cannot_commit_and_its_block_is_not_kept(make: Make) -> None:
    rig = make()
    reply = rig.ask(["a"])
    rig.sleep(11)
    rig.arena.expire(rig.mono_s, lambda owner, epoch: True)
    with pytest.raises(NotFound):
        rig.fill(["a"], reply)
    assert rig.read(["a"]) == ([], "absent")
    assert rig.keep(["a"]) == [0], "another slot, as the old one may still be written to"
    assert rig.arena.counts().num_quarantined == 1
    assert rig.read(["a"]) == ([payload("a")], "")


def test_a_release_that_comes_twice_or_early_frees_nothing_else(make: Make) -> None:
    rig = make()
    reply = rig.ask(["a"])
    rig.arena.release((reply.lease_id,))
    with pytest.raises(NotFound, match="draw a new one"):
        rig.ask(["a"], reply.lease_id)
    with pytest.raises(NotFound):
        rig.fill(["a"], reply)
    rig.keep(["a"])
    rig.arena.release((reply.lease_id,))
    assert rig.held(["a"]) == ["a"]


def test_older_attempts_and_processes_are_refused(make: Make) -> None:
    rig = make()
    rig.ask(["a"], request_id="r", attempt=2)
    with pytest.raises(Unavailable, match="attempt"):
        rig.ask(["b"], request_id="r", attempt=1)
    with pytest.raises(Unavailable, match="later process"):
        rig.ask(["b"], owner_epoch=4)


def test_what_is_forgotten_while_it_is_written_is_not_kept(make: Make) -> None:
    rig = make()
    reply = rig.ask(["a"])
    rig.store.give_up(rig.arena.book.index.salt("5a" * 16), "forgotten")
    rig.fill(["a"], reply)
    rig.arena.check_integrity()
    assert rig.held(["a"]) == []
    rig.arena.release((reply.lease_id,))
    assert rig.arena.counts().num_kept == rig.arena.counts().num_committed == 0


@pytest.mark.parametrize(
    ("param", "change"),
    [
        ("salt", {"salt": ""}),
        ("salt", {"salt": "x" * 65}),
        ("hashes", {"hashes": b""}),
        ("hashes", {"hashes": b"x" * 33}),
        ("hashes", {"hashes": bytes(32 * 4097)}),
        ("payload_bytes", {"payload_bytes": 0}),
        ("first_block", {"first_block": -1}),
        ("kind", {"kind": "page"}),
        ("traffic_class", {"traffic_class": "vip"}),
        ("retention_s", {"retention_s": -1.0}),
        ("lease_ms", {"lease_ms": 1}),
        ("lease_id", {"lease_id": "zz"}),
        ("owner", {"owner": "../x"}),
    ],
)
def test_a_bad_store_names_its_field(make: Make, param: str, change: dict[str, Any]) -> None:
    rig = make()
    with pytest.raises(InvalidRequest) as caught:
        rig.ask(["a"], **change)
    assert caught.value.param == param
    assert rig.arena.counts().num_reserved == 0


def test_a_read_takes_few_hashes(make: Make) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make().pin(list(range(65)))
    assert caught.value.param == "hashes"
    assert joined([1, 2])[:32] == digest(1)
