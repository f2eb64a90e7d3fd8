"""Who is taken for hung, and what becomes of it."""

import asyncio
import os
from pathlib import Path

from finback.services.supervisor.hang_watch import HangBook, HangWatch
from finback.services.supervisor.run_dir import RunDir
from finback.services.supervisor.slot import Slot
from finback.services.supervisor.topology import ProcessSpec
from finback.shared.actor.bus import Message
from finback.shared.actor.client import Client
from finback.shared.actor.local_bus import LocalBus
from finback.shared.wire import codec
from finback.shared.wire.messages.control import PingReply
from finback.shared.wire.subjects import Subjects

SERVES = "import signal; signal.pause()"


class Recorder:
    """A watcher that keeps what it is told."""

    def __init__(self) -> None:
        self.losses: list[tuple[str, bool]] = []
        self.lost_one = asyncio.Event()

    def changed(self) -> None:
        return

    async def lost(self, slot: Slot, instance: str, reason: str, *, is_crash: bool) -> None:
        self.losses.append((reason, is_crash))
        self.lost_one.set()


def make(folder: Path, name: str) -> tuple[Slot, Recorder]:
    (folder / "stub_service.py").write_text(SERVES)
    run_dir = RunDir(folder / "run")
    run_dir.create()
    recorder = Recorder()
    env = {**os.environ, "PYTHONPATH": str(folder)}
    spec = ProcessSpec(name=name, module="stub_service", roles=("stub",))
    return Slot(spec, run_dir, lambda spec, instance: env, recorder), recorder


async def started(slot: Slot) -> int:
    """The pid, once there is a process that runs."""
    async with asyncio.timeout(20):
        while slot.child is None or not slot.child.is_running:  # noqa: ASYNC110  # no event for it
            await asyncio.sleep(0.01)
    return slot.child.pid


def test_one_that_is_silent_while_others_answer() -> None:
    book = HangBook(10.0)
    book.watch(["a", "b"], 0.0)
    for now_s in range(1, 10):
        book.heard("b", float(now_s))
        assert book.hung(float(now_s)) == []
    book.heard("b", 10.0)
    assert book.hung(10.0) == ["a"]
    book.heard("a", 10.5)
    assert book.hung(11.0) == []


def test_where_all_are_silent_the_machine_is() -> None:
    book = HangBook(10.0)
    book.watch(["a", "b"], 0.0)
    assert book.hung(60.0) == []
    book.heard("b", 60.0)
    assert book.hung(60.1) == ["a"]
    book.forgive(60.2)
    assert book.hung(69.0) == []


def test_who_is_new_counts_as_heard_and_who_is_gone_as_nothing() -> None:
    book = HangBook(10.0)
    book.watch(["a", "b"], 0.0)
    book.watch(["b", "c"], 9.0)
    book.heard("a", 9.0)
    book.heard("b", 11.0)
    assert book.hung(11.0) == []
    book.heard("b", 19.5)
    assert book.hung(19.5) == ["c"]


async def test_a_hung_process_is_ended_and_started_again(tmp_path: Path) -> None:
    hangs, recorder = make(tmp_path, "hangs")
    lives, _ = make(tmp_path, "lives")
    bus, subjects = LocalBus(), Subjects("t")
    tasks = [asyncio.create_task(slot.keep()) for slot in (hangs, lives)]
    pids = [await started(slot) for slot in (hangs, lives)]

    def answer(message: Message) -> None:
        reply = PingReply(instance=lives.instance, epoch=1, state="serving")
        replies.append(asyncio.ensure_future(bus.publish(message.reply or "", codec.encode(reply))))

    replies: list[asyncio.Future[None]] = []
    await bus.subscribe(subjects.instance("stub", lives.instance, "ping"), answer)
    await bus.subscribe(subjects.instance("stub", hangs.instance, "ping"), lambda message: None)
    for slot in (hangs, lives):
        slot.report_state("serving")
    watch = HangWatch(Client(bus, subjects), [hangs, lives], timeout_s=2.0)
    tasks.append(asyncio.create_task(watch.run()))
    try:
        async with asyncio.timeout(20):
            await recorder.lost_one.wait()
        assert recorder.losses == [("no answer for 2 s", False)]
        await asyncio.sleep(0.1)
        assert await started(hangs) != pids[0]
        assert lives.child is not None and lives.child.pid == pids[1]
    finally:
        for slot in (hangs, lives):
            await slot.stop(5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *replies, return_exceptions=True)
        await bus.close()
