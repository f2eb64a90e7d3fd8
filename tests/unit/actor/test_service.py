"""Endpoints and the lifecycle on a LocalBus: bounds, deadlines, errors, drain, cancel."""

import asyncio
import time
from typing import Any

import pytest

from finback.shared.actor.client import Client
from finback.shared.actor.endpoint import Call
from finback.shared.actor.envelope import request_headers
from finback.shared.actor.fence import Fence
from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.memory_kv import MemoryKV
from finback.shared.actor.service import Service
from finback.shared.config import StackConfig
from finback.shared.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unavailable,
    WireError,
)
from finback.shared.wire import codec
from finback.shared.wire.messages.control import (
    DrainCommand,
    InstanceRecord,
    PingReply,
    PingRequest,
    StateChanged,
)
from finback.shared.wire.messages.decode import EndAck
from finback.shared.wire.messages.prefill import Ack, CancelReply, CancelRequest
from finback.shared.wire.subjects import Subjects
from support.local_service import serving

SUBJECTS = Subjects()


class Worker(Service):
    """Answers `cancel`: sleeps `choice` ms, unless the request id asks for something else."""

    name = "worker"

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.served: list[int] = []
        self.cancelled = 0
        self.drained = False
        self.ended: list[EndAck] = []

    async def start(self) -> None:
        await self.add_endpoint(
            "cancel", CancelRequest, self._cancel, scope="both", mailbox=2, workers=1
        )
        await self.add_endpoint("raw", bytes, self._raw, scope="any")
        await self.add_endpoint(
            "generate",
            CancelRequest,
            self._cancel,
            scope="instance",
            refuse_when_draining=True,
            fence=Fence(),
        )
        await self.listen(self.subjects.event("worker", "ended"), EndAck, self.ended.append)

    async def drain(self) -> None:
        self.drained = True

    async def _cancel(self, call: Call[CancelRequest]) -> CancelReply:
        message = call.message
        if message.request_id == "invalid":
            raise InvalidRequest("not so\nfast", param="messages")
        if message.request_id == "bug":
            raise RuntimeError("secret prompt")
        try:
            await asyncio.sleep((message.choice or 0) / 1000)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.served.append(message.attempt)
        return CancelReply(found=True)

    async def _raw(self, call: Call[bytes]) -> bytes:
        return call.message[::-1]


def _client(broker: LocalBroker) -> Client:
    return Client(LocalBus(broker), SUBJECTS)


async def _ask(
    client: Client, request_id: str = "r", sleep_ms: int = 0, timeout_s: float = 5, attempt: int = 1
) -> CancelReply:
    message = CancelRequest(request_id=request_id, attempt=attempt, choice=sleep_ms)
    subject = SUBJECTS.service("worker", "cancel")
    return await client.call(subject, message, CancelReply, timeout_s=timeout_s)


async def test_a_call_is_answered_by_queue_group_and_by_instance() -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker) as worker:
        client = _client(broker)
        assert (await _ask(client)).found
        subject = SUBJECTS.instance("worker", worker.instance, "cancel")
        message = CancelRequest(request_id="r", attempt=2)
        assert await client.call(subject, message, CancelReply, timeout_s=1) == CancelReply(
            found=True
        )
        raw = await client.bus.request(SUBJECTS.service("worker", "raw"), b"abc", timeout_s=1)
        assert raw.data == b"cba"


async def test_errors_reach_the_caller_as_themselves() -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker):
        client = _client(broker)
        with pytest.raises(InvalidRequest) as invalid:
            await _ask(client, "invalid")
        assert invalid.value.public_message == "not so\nfast"
        assert invalid.value.param == "messages"
        subject = SUBJECTS.service("worker", "cancel")
        with pytest.raises(WireError, match="undecodable"):
            await client.bus.request(subject, b"\xc1", timeout_s=1)


async def test_a_bug_leaks_nothing_is_counted_and_hurts_nobody_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker) as worker:
        client = _client(broker)
        with pytest.raises(ServingError) as caught:
            await _ask(client, "bug")
        assert caught.value.code == "internal"
        assert caught.value.public_message == "internal error"
        assert worker.metrics.value("finback.endpoint.bugs", endpoint="worker cancel") == 1
        assert (await _ask(client)).found
    assert capsys.readouterr().err.count("handler failed") == 1


async def test_a_full_mailbox_answers_at_once() -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker) as worker:
        client = _client(broker)
        asked = [asyncio.create_task(_ask(client, sleep_ms=200)) for _ in range(6)]
        begun = time.monotonic()
        outcome = await asyncio.gather(*asked, return_exceptions=True)
        refused = [e for e in outcome if isinstance(e, Overloaded)]
        # One is worked on once the worker has taken it; two wait; which of the six is chance.
        assert len(refused) in (3, 4)
        assert refused[0].retry_after_s == 1.0
        assert time.monotonic() - begun < 2
        count = worker.metrics.value("finback.endpoint.overloaded", endpoint="worker cancel")
        assert count == len(refused)


async def test_the_deadline_ends_the_work() -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker) as worker:
        bus = LocalBus(broker)
        body = codec.encode(CancelRequest(request_id="r", attempt=1, choice=60_000))
        headers = request_headers("prefill.CancelRequest/1", timeout_s=0.1)
        subject = SUBJECTS.service("worker", "cancel")
        with pytest.raises(DeadlineExceeded):
            await bus.request(subject, body, headers, timeout_s=5)
        assert worker.cancelled == 1


async def test_expired_work_is_dropped_at_its_turn() -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker) as worker:
        client = _client(broker)
        first = asyncio.create_task(_ask(client, sleep_ms=200))
        await asyncio.sleep(0.02)
        with pytest.raises(DeadlineExceeded):
            await _ask(client, timeout_s=0.05, attempt=9)
        await first
        await asyncio.sleep(0.05)
        assert worker.served == [1]
        assert worker.metrics.value("finback.endpoint.expired", endpoint="worker cancel") == 1


async def test_older_attempts_and_other_epochs_are_fenced_off() -> None:
    broker = LocalBroker()
    async with serving(Worker, broker=broker) as worker:
        client = _client(broker)
        subject = SUBJECTS.instance("worker", worker.instance, "generate")

        async def generate(attempt: int, epoch: int = 0) -> CancelReply:
            message = CancelRequest(request_id="r", attempt=attempt)
            return await client.call(
                subject,
                message,
                CancelReply,
                timeout_s=1,
                request_id="r",
                attempt=attempt,
                epoch=epoch,
            )

        assert (await generate(2, worker.epoch)).found
        with pytest.raises(Unavailable, match="superseded"):
            await generate(1)
        with pytest.raises(Unavailable, match="another epoch"):
            await generate(3, worker.epoch - 1)


async def test_builtins_and_events() -> None:
    broker = LocalBroker()
    states: list[str] = []
    watcher = LocalBus(broker)
    await watcher.subscribe(
        SUBJECTS.event("worker", "state"),
        lambda message: states.append(codec.decode(message.data, StateChanged).state),
    )
    async with serving(Worker, broker=broker) as worker:
        client = _client(broker)
        ping = SUBJECTS.instance("worker", worker.instance, "ping")
        reply = await client.call(ping, PingRequest(), PingReply, timeout_s=1)
        assert (reply.instance, reply.epoch, reply.state) == (
            worker.instance,
            worker.epoch,
            "serving",
        )
        metrics = SUBJECTS.instance("worker", worker.instance, "metrics")
        text = await client.bus.request(metrics, b"", timeout_s=1)
        assert b"finback_registry_up 1.0" in text.data
        await client.publish(SUBJECTS.event("worker", "ended"), EndAck(ended=(("r", 0, 1),)))
        await client.bus.publish(SUBJECTS.event("worker", "ended"), b"junk")
        await asyncio.sleep(0.01)
        assert len(worker.ended) == 1
        assert worker.metrics.value("finback.listen.undecodable") == 1
        drain = SUBJECTS.instance("worker", worker.instance, "drain")
        assert await client.call(drain, DrainCommand(timeout_s=1), Ack, timeout_s=1) == Ack()
        assert worker.drain_requested.is_set()
        assert worker.drain_timeout_s == 1
    await asyncio.sleep(0)
    assert states == ["starting", "serving", "draining", "stopped"]


async def test_drain_finishes_open_work_and_takes_nothing_new() -> None:
    broker, kv = LocalBroker(), MemoryKV(ttl_s=3)
    async with serving(Worker, broker=broker, kv=kv) as worker:
        client = _client(broker)
        open_work = asyncio.create_task(_ask(client, sleep_ms=200))
        await asyncio.sleep(0.02)
        finishing = asyncio.create_task(worker.finish())
        await asyncio.sleep(0.05)
        entry = await kv.get(f"worker.{worker.instance}")
        assert entry is not None and entry.value is not None
        assert codec.decode(entry.value, InstanceRecord).state == "draining"
        with pytest.raises(Unavailable):
            await _ask(client)
        generate = SUBJECTS.instance("worker", worker.instance, "generate")
        with pytest.raises(Unavailable, match="draining"):
            message = CancelRequest(request_id="r", attempt=1)
            await client.call(generate, message, CancelReply, timeout_s=1)
        assert (await open_work).found
        await finishing
        assert worker.drained
        entry = await kv.get(f"worker.{worker.instance}")
        assert entry is not None and entry.value is None


async def test_after_the_drain_deadline_open_work_is_told_unavailable() -> None:
    broker = LocalBroker()
    config = StackConfig(drain_timeout_s=0.1)
    async with serving(Worker, broker=broker, config=config) as worker:
        client = _client(broker)
        asked = [asyncio.create_task(_ask(client, sleep_ms=60_000)) for _ in range(2)]
        await asyncio.sleep(0.02)
        begun = time.monotonic()
        await worker.finish()
        outcome = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(e) for e in outcome] == [Unavailable, Unavailable]
        assert time.monotonic() - begun < 1
        assert worker.cancelled == 1, "the other never left the mailbox"


async def test_a_failing_task_takes_the_service_down() -> None:
    async def fail() -> None:
        raise RuntimeError("engine died")

    with pytest.raises(ExceptionGroup) as caught:
        async with serving(Worker) as worker:
            worker.spawn(fail)
            await asyncio.sleep(5)
    assert caught.group_contains(RuntimeError, match="engine died")
