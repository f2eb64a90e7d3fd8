"""`forget` while blocks are on their way: to files, from files, and from writers."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.cache import file_tier, tier_health
from finback.services.cache.forgotten import ForgetRule, Forgotten
from finback.services.cache.segments.store import SegmentStore
from finback.shared.wire.messages.cache_admin import ForgetReply, ForgetRequest
from support.cache_asker import Asker, open_asker
from support.cache_files import NAMES, files, in_files, keep_in_files, ready, until
from support.kv_store import SALT, digest, joined, payload


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_health, "REST_S", (0.05, 0.1))
    monkeypatch.setattr(file_tier, "_UPKEEP_EVERY_S", 0.05)


class Gate:
    """Lets a thread wait in the middle of a call of the store."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self._open = threading.Event()

    def wait(self) -> None:
        self.is_reached.set()
        assert self._open.wait(20)

    def open(self) -> None:
        self._open.set()


async def forget(asker: Asker, **what: Any) -> ForgetReply:
    return await asker.ask("forget", ForgetRequest(**what), ForgetReply)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_block_on_its_way_to_files_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether the thread stands before or behind its write when all is forgotten."""
    gate, real = Gate(), SegmentStore.put

    def put(self: SegmentStore, *args: Any) -> bool:
        if when == "before":
            gate.wait()
        is_new = real(self, *args)
        if when == "after":
            gate.wait()
        return is_new

    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        monkeypatch.setattr(SegmentStore, "put", put)
        await asker.keep(["a"], tenant="t")
        await until(gate.is_reached.is_set)
        replies: list[ForgetReply] = []

        async def ask() -> None:
            replies.append(await forget(asker, tenant="t"))

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            await until(lambda: asker.service.arena.counts().num_kept == 0)
            assert not replies, "it is not said to be forgotten while it may be written"
            gate.open()
        assert replies[0].num_host == 1
        assert in_files(asker, ["a"]) == []
        assert (await asker.lookup(["a"])).num_found == 0
        await asker.keep(["a"], tenant="t")
        await until(lambda: in_files(asker, ["a"]) == ["a"])


async def test_a_block_on_its_way_from_files_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = Gate(), SegmentStore.read_many

    def read_many(self: SegmentStore, *args: Any) -> Any:
        outcomes = real(self, *args)
        gate.wait()
        return outcomes

    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        monkeypatch.setattr(SegmentStore, "read_many", read_many)
        assert (await asker.read(NAMES, wait_ms=10))[0].miss == "slow"
        await until(gate.is_reached.is_set)

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: forget(asker, hashes=joined(NAMES), salt=SALT))
            await until(lambda: not in_files(asker, NAMES))
            gate.open()
        await until(lambda: asker.service.arena.counts().num_reserved == 0)
        assert asker.service.arena.counts().num_kept == 0
        assert await asker.bytes_of(NAMES) == ([], "evicted")


async def test_a_block_found_in_files_before_and_reserved_after_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = Gate(), SegmentStore.find

    def find(self: SegmentStore, *args: Any) -> Any:
        found = real(self, *args)
        gate.wait()
        return found

    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await keep_in_files(asker)
        monkeypatch.setattr(SegmentStore, "find", find)
        assert (await asker.read(NAMES, wait_ms=10))[0].miss == "slow"
        await until(gate.is_reached.is_set)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: forget(asker, is_all=True))
            await until(lambda: not in_files(asker, NAMES))
            gate.open()
        await until(lambda: asker.service._blocks._promotion.num_loading == 0)
        assert asker.service.arena.counts().num_kept == 0


async def test_a_block_that_a_writer_is_filling_is_not_kept(tmp_path: Path) -> None:
    async with open_asker(tmp_path) as asker:
        reply = await asker.store(["a", "b"], tenant="t")
        assert (await forget(asker, tenant="t")).num_host == 2
        await asker.release(reply.lease_id)
        assert (await asker.lookup(["a"])).num_found == 0


async def test_others_are_left_alone_under_load(tmp_path: Path) -> None:
    """Two tenants store and read all the time; what the one has is forgotten again and again."""
    async with open_asker(tmp_path, **files(tmp_path)) as asker:
        await ready(asker)
        await asker.keep(["z"], tenant="other", traffic_class="agent")
        is_done, num_turns = False, Counter[str]()

        async def store(tenant: str) -> None:
            while not is_done:
                num_turns[tenant] += 1
                await asker.keep([f"{tenant}{num_turns[tenant]}"], tenant=tenant)

        async with anyio.create_task_group() as group:
            for tenant in ("t", "u"):
                group.start_soon(store, tenant)
            for _ in range(10):
                await anyio.sleep(0.02)
                await forget(asker, tenant="t")
            is_done = True
        await forget(asker, tenant="t")
        mine = [f"t{turn}" for turn in range(num_turns["t"] + 1)]
        found = [(name, await asker.lookup([name])) for name in mine]
        assert [(n, r) for n, r in found if r.num_found] == []
        assert in_files(asker, mine) == []
        assert await asker.bytes_of(["z"]) == ([payload("z")], "")
        assert (await asker.lookup([f"u{num_turns['u']}"])).num_found == 1


# --- the rules alone


@given(
    st.lists(
        st.one_of(
            st.just(("begin", 0)),
            st.tuples(st.just("end"), st.integers(0, 5)),
            st.tuples(st.just("forget"), st.integers(0, 3)),
        ),
        max_size=40,
    )
)
def test_a_mark_is_void_for_what_was_forgotten_since(steps: list[tuple[str, int]]) -> None:
    """Against a list of all that ever happened."""
    forgotten = Forgotten()
    open_marks: list[tuple[int, set[int]]] = []  # the mark; what was forgotten since
    for what, number in steps:
        if what == "begin":
            open_marks.append((forgotten.begin(), set()))
        elif what == "end" and number < len(open_marks):
            forgotten.end(open_marks.pop(number)[0])
        elif what == "forget":
            at = forgotten.add(ForgetRule(hashes=frozenset({digest(number)})))
            for _, since in open_marks:
                since.add(number)
            assert forgotten.num_before(at) == len(open_marks)
        for mark, since in open_marks:
            void = {n for n in range(4) if forgotten.is_void(mark, SALT, digest(n), b"")}
            assert void == since


def test_too_many_rules_are_one_for_all() -> None:
    forgotten = Forgotten()
    mark = forgotten.begin()
    for number in range(1000):
        forgotten.add(ForgetRule(hashes=frozenset({digest(number)})))
    assert len(forgotten._rules) <= 256
    assert all(forgotten.is_void(mark, SALT, digest(n), b"") for n in range(1000))
    assert not forgotten.is_void(forgotten.begin(), SALT, digest(1), b"")
