"""The store against a slow twin, through random lives: pressure, leases, clocks, pins, restarts."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from finback.services.cache.retention import CLASSES, Retention
from finback.services.cache.store_policy import StorePolicy
from finback.shared.lanes.arena_format import SlotState
from finback.shared.wire.messages.cache_store import StoreReply
from support.kv_store import SALT, StoreRig, digest, joined, payload

RETENTION_S = {"batch": 0, "chat": 1000, "agent": 300}
LEASE_S = 10.0
# Pins are synced to the disk, which takes milliseconds on a real one.
_SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None
NAMES = [f"n{number}" for number in range(24)]


@dataclass
class TwinBlock:
    """A kept block, or one being written (`is_open`), as a line in a list."""

    name: str
    rank: int  # of its class
    retention_s: int
    index: int
    is_open: bool = True
    used_s: float = 0.0  # monotonic
    wall_s: float = 0.0
    expiry_s: float = 0.0
    is_found: bool = True  # False once it was given up
    holders: set[str] = field(default_factory=set)


class StoreMachine(RuleBasedStateMachine):
    """One writer and one reader, an arena of some fifteen blocks, 24 names."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="finback-test-", dir=_SHM))
        retention = Retention(batch_s=0, chat_s=1000, agent_s=300)
        self.rig = StoreRig(
            self.folder / "arena", policy=StorePolicy(retention=retention), max_bytes=1 << 17
        )
        probe = self.rig.ask([f"probe{number}" for number in range(64)])
        self.capacity = len(probe.slots)
        self.rig.arena.release((probe.lease_id,))
        self.blocks: list[TwinBlock] = []
        self.leases: dict[str, tuple[float, float]] = {}  # id -> opened, deadline
        self.open: dict[str, tuple[list[str], StoreReply]] = {}
        self.pins: dict[str, list[str]] = {}

    def teardown(self) -> None:
        self.rig.close()
        shutil.rmtree(self.folder)

    # --- the twin

    def found(self, name: str) -> TwinBlock | None:
        return next((b for b in self.blocks if b.name == name and b.is_found), None)

    def is_pinned(self, block: TwinBlock) -> bool:
        return any(block.name in names for names in self.pins.values())

    def is_over(self, block: TwinBlock) -> bool:
        return 0 < block.expiry_s <= self.rig.wall_s and not self.is_pinned(block)

    def drop(self, block: TwinBlock) -> None:
        block.is_found = False
        if not block.holders:
            self.blocks.remove(block)

    def idle(self) -> list[TwinBlock]:
        return [
            b for b in self.blocks
            if b.is_found and not b.is_open and not b.holders and not self.is_pinned(b)
        ]  # fmt: skip

    def sweep(self) -> None:
        for block in self.idle():
            if self.is_over(block):
                self.drop(block)

    def make_room(self, num_slots: int, rank: int) -> int:
        highest = 0 if rank == 0 else 2
        while self.capacity - len(self.blocks) < num_slots:
            idle = [b for b in self.idle() if b.rank <= highest]
            if not idle:
                break
            self.drop(min(idle, key=lambda b: (b.rank, b.used_s, -b.index, self.place(b))))
        return min(num_slots, self.capacity - len(self.blocks))

    def place(self, block: TwinBlock) -> tuple[int, int]:
        """Where it lies, which decides between equals."""
        return self.rig.arena.book.index.get((SALT, 0, digest(block.name))) or (0, 0)

    def end(self, lease_id: str) -> None:
        self.leases.pop(lease_id, None)
        self.open.pop(lease_id, None)
        for block in list(self.blocks):
            block.holders.discard(lease_id)
            if not block.holders and (block.is_open or not block.is_found):
                self.blocks.remove(block)

    # --- rules

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True),
        class_=st.sampled_from(sorted(CLASSES)),
        first_block=st.integers(0, 3),
        is_committed=st.booleans(),
    )
    def store(self, names: list[str], class_: str, first_block: int, is_committed: bool) -> None:
        lease_id, rank, retention_s = self.rig.lease(), CLASSES[class_], RETENTION_S[class_]
        fresh = []
        for index, name in enumerate(names, first_block):
            block = self.found(name)
            if (
                block is not None
                and not block.is_open
                and self.is_over(block)
                and not block.holders
            ):
                self.drop(block)
                block = None
            if block is None:
                fresh.append(TwinBlock(name, rank, retention_s, index))
            elif not block.is_open:
                block.rank = max(block.rank, rank)
                block.retention_s = longest = max(block.retention_s, retention_s)
                block.wall_s = self.rig.wall_s
                block.expiry_s = max(block.expiry_s, self.rig.wall_s + longest) if longest else 0
                block.used_s = self.rig.mono_s
        if fresh:
            self.sweep()
        got = fresh[: self.make_room(len(fresh), rank)]
        for block in got:
            block.holders.add(lease_id)
            self.blocks.append(block)
        reply = self.rig.ask(names, lease_id, traffic_class=class_, first_block=first_block)
        assert [names[index] for index in reply.indexes] == [block.name for block in got]
        if got:
            self.leases[lease_id] = (self.rig.mono_s, self.rig.mono_s + LEASE_S)
            self.open[lease_id] = (names, reply)
        if is_committed and got:
            self.commit_one(lease_id)
            self.release_one(lease_id)

    def commit_one(self, lease_id: str) -> None:
        names, reply = self.open.pop(lease_id)
        self.rig.fill(names, reply)
        opened_s, _ = self.leases[lease_id]
        self.leases[lease_id] = (opened_s, self.rig.mono_s + LEASE_S)
        for block in self.blocks:
            if lease_id in block.holders and block.is_open:
                block.is_open = False
                block.used_s, block.wall_s = opened_s, self.rig.wall_s
                held_s = block.retention_s
                block.expiry_s = self.rig.wall_s + held_s if held_s else 0

    def release_one(self, lease_id: str) -> None:
        self.rig.arena.release((lease_id,))
        self.end(lease_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_one(data.draw(st.sampled_from(sorted(self.open))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_one(data.draw(st.sampled_from(sorted(self.leases))))

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
          is_kept=st.booleans())  # fmt: skip
    def read(self, names: list[str], is_kept: bool) -> None:
        lease_id = self.rig.lease()
        run = []
        for name in names:
            block = self.found(name)
            if block is None or block.is_open or self.is_over(block):
                break
            run.append(block)
        copies, miss = self.rig.pin(names, lease_id)
        assert copies == [payload(block.name) for block in run]
        assert (miss == "") == (len(run) == len(names))
        for block in run:
            block.holders.add(lease_id)
            block.used_s = max(block.used_s, self.rig.mono_s)
            step_s = min(60, block.retention_s / 8) if block.retention_s else 60
            if abs(self.rig.wall_s - block.wall_s) >= step_s:
                block.wall_s, held_s = self.rig.wall_s, block.retention_s
                block.expiry_s = self.rig.wall_s + held_s if held_s else 0
        if run:
            self.leases[lease_id] = (self.rig.mono_s, self.rig.mono_s + LEASE_S)
        if not is_kept:
            self.release_one(lease_id)

    @rule(
        seconds=st.sampled_from([0, 1, 4, 11, 70, 400]), jump=st.sampled_from([0, 0, 0, 500, -500])
    )
    def wait(self, seconds: int, jump: int) -> None:
        self.rig.sleep(seconds)
        self.rig.wall_s += jump
        if jump < 0:
            self.rig.store.clock_went_back(self.rig.now)
            for block in self.blocks:
                if block.is_found and not block.is_open:
                    latest = self.rig.wall_s + block.retention_s
                    block.expiry_s = min(block.expiry_s, latest)
                    block.wall_s = min(block.wall_s, self.rig.wall_s)
        self.rig.arena.expire(self.rig.mono_s, lambda owner, epoch: False)
        for lease_id, (_, deadline_s) in list(self.leases.items()):
            if deadline_s <= self.rig.mono_s:
                self.end(lease_id)
        self.rig.store.sweep(self.rig.now)
        self.sweep()

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: str) -> None:
        key = self.rig.arena.book.index.get((SALT, 0, digest(name)))
        self.rig.store.give_up([key] if key else [], "forgotten")
        block = self.found(name)
        if block is not None:
            self.drop(block)

    @rule(
        name=st.sampled_from(["p", "q"]),
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3),
    )
    def pin(self, name: str, names: list[str]) -> None:
        self.rig.store.pin(name, SALT, joined(names))
        self.pins[name] = names

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.rig.store.unpin(name)
        del self.pins[name]

    @rule()
    def restart(self) -> None:
        """Read leases are not stored; those of writers begin their time anew."""
        self.rig.restart()
        writers = {i for b in self.blocks for i in b.holders if b.is_open}
        written = {
            header.lease_id
            for _, header in self.rig.arena.book.slots()
            if header.state in (SlotState.KEPT, SlotState.COMMITTED) and header.lease_id
        }
        for lease_id in list(self.leases):
            if lease_id not in writers | written:
                self.end(lease_id)
            else:
                self.leases[lease_id] = (self.rig.mono_s, self.rig.mono_s + LEASE_S)
        for block in list(self.blocks):
            self._forget_holders(block)
            if not block.is_open:
                block.used_s = self.rig.mono_s - max(0, self.rig.wall_s - block.wall_s)

    def _forget_holders(self, block: TwinBlock) -> None:
        if block.is_open or not block.is_found:
            return
        key = self.rig.arena.book.index.get((SALT, 0, digest(block.name)))
        assert key is not None
        lease_id = self.rig.arena.book.header(key).lease_id
        block.holders = {lease_id} if lease_id else set()

    @invariant()
    def agrees(self) -> None:
        self.rig.arena.check_integrity()
        counts = self.rig.arena.counts()
        found = [b for b in self.blocks if b.is_found and not b.is_open]
        assert counts.num_kept == len(found)
        assert counts.num_free == self.capacity - len(self.blocks)
        for name in NAMES:
            key = self.rig.arena.book.index.get((SALT, 0, digest(name)))
            block = self.found(name)
            assert (key is not None) == (block is not None)
            if key is not None and block is not None and not block.is_open:
                header = self.rig.arena.book.header(key)
                assert header.label is not None
                assert header.label.traffic_class == block.rank
                assert (header.expiry_s, header.is_pinned) == (
                    block.expiry_s,
                    self.is_pinned(block),
                )
                assert self.rig.arena.book.is_held(key) == bool(block.holders)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
