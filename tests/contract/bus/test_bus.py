"""One contract, run over `LocalBus` and over a real server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from finback.shared.actor.bus import FRAME_RESERVE_BYTES, Bus, Message
from finback.shared.actor.envelope import error_headers
from finback.shared.actor.local_bus import LocalBroker, LocalBus
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import (
    DeadlineExceeded,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    WireError,
)
from support.nats_server import NatsServer

Pair = Callable[[], contextlib.AbstractAsyncContextManager[tuple[Bus, Bus]]]


@pytest.fixture(params=["local", pytest.param("nats", marks=pytest.mark.nats)])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Two connections to one bus."""
    if request.param == "local":

        @contextlib.asynccontextmanager
        async def local() -> AsyncIterator[tuple[Bus, Bus]]:
            broker = LocalBroker()
            one, two = LocalBus(broker), LocalBus(broker)
            try:
                yield one, two
            finally:
                await one.close()
                await two.close()

        return local
    server: NatsServer = request.getfixturevalue("nats_server")

    @contextlib.asynccontextmanager
    async def real() -> AsyncIterator[tuple[Bus, Bus]]:
        one = await connect(BusSettings(url=server.url, name="one"))
        two = await connect(BusSettings(url=server.url, name="two"))
        try:
            yield one, two
        finally:
            await one.close()
            await two.close()

    return real


def responder(bus: Bus, tasks: set["asyncio.Task[None]"], **headers: str) -> Callable[..., None]:
    """A callback that answers with the body turned around."""

    def answer(message: Message) -> None:
        assert message.reply is not None
        task = asyncio.ensure_future(bus.publish(message.reply, message.data[::-1], headers))
        tasks.add(task)

    return answer


async def _until(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # polls what has no event
            await asyncio.sleep(0.005)


async def test_publish_reaches_subscribers_in_order_with_headers(
    pair: Pair, subject_prefix: str
) -> None:
    got: list[Message] = []
    async with pair() as (one, two):
        await one.subscribe(f"{subject_prefix}.*", got.append)
        for i in range(100):
            await two.publish(f"{subject_prefix}.x", b"%d" % i, {"Finback-Seq": str(i)})
        await _until(lambda: len(got) == 100)
        assert [m.data for m in got] == [b"%d" % i for i in range(100)]
        assert [m.headers["Finback-Seq"] for m in got] == [str(i) for i in range(100)]
        assert got[0].reply is None
        assert got[0].subject == f"{subject_prefix}.x"


async def test_a_subscription_is_ready_when_subscribe_returns(
    pair: Pair, subject_prefix: str
) -> None:
    async with pair() as (one, two):
        for i in range(200):
            got: list[Message] = []
            subject = f"{subject_prefix}.ready.{i}"
            subscription = await one.subscribe(subject, got.append)
            await two.publish(subject, b"x")
            await _until(lambda got=got: len(got) == 1)  # type: ignore[misc]  # bound a turn
            await subscription.unsubscribe()


async def test_queue_groups_share(pair: Pair, subject_prefix: str) -> None:
    got: tuple[list[Message], list[Message]] = ([], [])
    async with pair() as (one, two):
        await one.subscribe(f"{subject_prefix}.q", got[0].append, queue="g")
        await two.subscribe(f"{subject_prefix}.q", got[1].append, queue="g")
        for _ in range(100):
            await one.publish(f"{subject_prefix}.q", b"x")
        await _until(lambda: len(got[0]) + len(got[1]) >= 100)
        await asyncio.sleep(0.02)
        assert len(got[0]) + len(got[1]) == 100
        assert got[0] and got[1]


async def test_requests_are_answered_each_its_own(pair: Pair, subject_prefix: str) -> None:
    tasks: set[asyncio.Task[None]] = set()
    async with pair() as (one, two):
        await one.subscribe(f"{subject_prefix}.r", responder(one, tasks))
        asked = [two.request(f"{subject_prefix}.r", b"%04d" % i, timeout_s=3) for i in range(50)]
        replies = await asyncio.gather(*asked)
        assert [r.data for r in replies] == [(b"%04d" % i)[::-1] for i in range(50)]


async def test_nobody_listens_is_said_at_once(pair: Pair, subject_prefix: str) -> None:
    async with pair() as (one, _):
        async with asyncio.timeout(1):
            with pytest.raises(Unavailable) as caught:
                await one.request(f"{subject_prefix}.nobody", b"", timeout_s=30)
        assert caught.value.reason == "no_responders"


async def test_silence_is_a_deadline(pair: Pair, subject_prefix: str) -> None:
    async with pair() as (one, two):
        await one.subscribe(f"{subject_prefix}.mute", lambda message: None)
        with pytest.raises(DeadlineExceeded):
            await two.request(f"{subject_prefix}.mute", b"", timeout_s=0.05)


async def test_error_headers_become_errors(pair: Pair, subject_prefix: str) -> None:
    tasks: set[asyncio.Task[None]] = set()
    headers = error_headers(Overloaded("full: voll é", reason="queue", retry_after_s=2.5))
    async with pair() as (one, two):
        await one.subscribe(f"{subject_prefix}.e", responder(one, tasks, **headers))
        with pytest.raises(Overloaded) as caught:
            await two.request(f"{subject_prefix}.e", b"", timeout_s=3)
        assert caught.value.public_message == "full: voll é"
        assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize("where", ["body", "headers"])
async def test_too_large_is_refused_here_and_the_connection_lives(
    pair: Pair, subject_prefix: str, where: str
) -> None:
    got: list[Message] = []
    async with pair() as (one, two):
        limit = one.max_payload - FRAME_RESERVE_BYTES
        await two.subscribe(f"{subject_prefix}.big", got.append)
        body = b"x" * (limit + 1 if where == "body" else limit - 100)
        headers = {"Finback-Error": "y" * 200}
        subject = f"{subject_prefix}.big"
        for sending in (
            one.publish(subject, body, headers),
            one.request(subject, body, headers, timeout_s=1),
        ):
            with pytest.raises(PayloadTooLarge) as caught:
                await sending
            assert str(limit) in caught.value.public_message
        await one.publish(f"{subject_prefix}.big", b"x" * (limit - 100), {"A": "b"})
        await _until(lambda: len(got) == 1)
        assert one.is_connected


async def test_drained_subscriptions_get_what_was_sent_and_no_more(
    pair: Pair, subject_prefix: str
) -> None:
    got: list[Message] = []
    async with pair() as (one, _):
        subscription = await one.subscribe(f"{subject_prefix}.d", got.append)
        for _ in range(10):
            await one.publish(f"{subject_prefix}.d", b"x")
        await subscription.drain()
        assert len(got) == 10
        await one.publish(f"{subject_prefix}.d", b"x")
        await one.flush()
        await asyncio.sleep(0.02)
        assert len(got) == 10


async def test_a_closed_bus_says_so(pair: Pair, subject_prefix: str) -> None:
    async with pair() as (one, _):
        await one.close()
        assert one.is_closed
        assert not one.is_connected
        with pytest.raises(Unavailable):
            await one.publish(f"{subject_prefix}.x", b"")
        with pytest.raises(Unavailable):
            await one.request(f"{subject_prefix}.x", b"", timeout_s=1)
        with pytest.raises(Unavailable):
            await one.subscribe(f"{subject_prefix}.x", lambda message: None)


async def test_odd_subjects_are_wire_errors(pair: Pair) -> None:
    async with pair() as (one, _):
        for subject in ("", "a b", "a..b"):
            with pytest.raises(WireError):
                await one.publish(subject, b"")
