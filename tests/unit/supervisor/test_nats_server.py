"""The private server: who may say and hear what, and how it starts again."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from finback.services.supervisor import nats_config, nats_server
from finback.services.supervisor.nats_server import NatsServer
from finback.services.supervisor.run_dir import RunDir
from finback.shared.actor.bus import Message
from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.errors import ConfigError, ServingError

pytestmark = pytest.mark.nats


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[NatsServer]:
    run_dir = RunDir(folder)
    run_dir.create()
    made = await nats_server.start(run_dir, port=0, prefix="finback", name="test")
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def bus(made: NatsServer, user: str) -> AsyncIterator[NatsBus]:
    opened = await connect(
        BusSettings(url=made.url, name=user, user=user, password=made.passwords[user])
    )
    try:
        yield opened
    finally:
        await opened.close()


async def answers(asker: NatsBus, subject: str, *, within_s: float = 30.0) -> bool:
    try:
        await asker.request(subject, b"", timeout_s=within_s)
    except ServingError:
        return False
    return True


async def test_secrets_are_for_their_owner_only(tmp_path: Path) -> None:
    async with server(tmp_path) as made:
        for name in ("nats.conf", "credentials.json"):
            assert (tmp_path / "nats" / name).stat().st_mode & 0o077 == 0
        assert len(set(made.passwords.values())) == len(made.passwords)


async def test_a_wrong_password_is_refused(tmp_path: Path) -> None:
    async with server(tmp_path) as made:
        with pytest.raises(ConfigError, match="refuses"):
            await connect(BusSettings(url=made.url, user="router", password="x"))


async def answer_on(bus: NatsBus, subject: str) -> None:
    """Answer every request on `subject`."""
    replies: set[asyncio.Task[None]] = set()

    def answer(message: Message) -> None:
        task = asyncio.ensure_future(bus.publish(message.reply or "", b"ok"))
        replies.add(task)
        task.add_done_callback(replies.discard)

    await bus.subscribe(subject, answer)


async def test_a_service_asks_whom_it_needs_and_nobody_else(tmp_path: Path) -> None:
    async with (
        server(tmp_path) as made,
        bus(made, "router") as router,
        bus(made, "cache") as cache,
        bus(made, "gateway") as gateway,
        bus(made, "decode") as worker,
    ):
        await answer_on(router, "finback.v1.router.route")
        await answer_on(worker, "finback.v1.prefill.decode-1.generate")
        assert await answers(gateway, "finback.v1.router.route")
        assert await answers(gateway, "finback.v1.prefill.decode-1.generate")
        assert not await answers(cache, "finback.v1.router.route", within_s=0.3)


@pytest.mark.parametrize(
    ("asker", "subject"),
    [
        ("gateway", "finback.v1.cache.cache-1.lookup"),
        ("decode", "finback.v1.cache.cache-1.export"),
        ("prefill", "finback.v1.cache.import"),
        ("router", "finback.v1.cache.cache-1.forget"),
        ("cache", "finback.v1.cache.cache-1.stats"),
        ("decode", "finback.v1.gateway.gateway-1.forget"),
        ("gateway", "finback.v1.decode.decode-1.forget-pool"),
    ],
)
async def test_operators_verbs_are_for_the_supervisor_alone(
    tmp_path: Path, asker: str, subject: str
) -> None:
    answerer = subject.split(".")[2]
    async with (
        server(tmp_path) as made,
        bus(made, asker) as one,
        bus(made, answerer) as other,
        bus(made, nats_config.SUPERVISOR) as supervisor,
    ):
        await answer_on(other, subject)
        await other.flush()
        assert not await answers(one, subject, within_s=0.3)
        assert await answers(supervisor, subject)


@pytest.mark.parametrize(
    ("asker", "answerer", "subject"),
    [
        ("prefill", "gateway", "finback.v1.gateway.gateway-1.failed"),
        ("decode", "gateway", "finback.v1.gateway.gateway-1.failed"),  # a worker with both roles
        ("cache", "cache", "finback.v1.cache.cache-2.kv-snapshot"),
        ("router", "cache", "finback.v1.cache.cache-2.kv-snapshot"),
    ],
)
async def test_who_must_be_told_can_be_told(
    tmp_path: Path, asker: str, answerer: str, subject: str
) -> None:
    async with server(tmp_path) as made, bus(made, asker) as one, bus(made, answerer) as other:
        await answer_on(other, subject)
        await other.flush()
        assert await answers(one, subject)


async def test_a_client_hears_only_its_own_answers(tmp_path: Path) -> None:
    heard: list[str] = []
    async with (
        server(tmp_path) as made,
        bus(made, nats_config.CLIENT) as client,
        bus(made, "gateway") as gateway,
        bus(made, "decode") as decode,
    ):
        await client.subscribe("_INBOX.>", lambda message: heard.append(message.subject))
        own, others = client.new_inbox(), gateway.new_inbox()
        await decode.publish(others, b"not for the client")
        await gateway.publish(own, b"for the client")
        await gateway.flush()
        async with asyncio.timeout(30):
            while own not in heard:  # noqa: ASYNC110  # a test listens from outside
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # room for what must not come
    assert heard == [own]


async def test_it_starts_again_on_the_same_port(tmp_path: Path) -> None:
    async with server(tmp_path) as made, bus(made, "router") as router:
        port, old = made.port, made.child.pid
        back = asyncio.Event()

        async def reconnected() -> None:
            back.set()

        router.on_reconnect(reconnected)
        os.kill(old, signal.SIGKILL)
        assert await made.child.wait() == -signal.SIGKILL
        await made.restart()
        assert made.port == port
        assert made.child.pid != old
        async with asyncio.timeout(30):
            await back.wait()
        assert router.is_connected


async def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    async with server(tmp_path / "a") as made:
        run_dir = RunDir(tmp_path / "b")
        run_dir.create()
        with pytest.raises(ConfigError, match=f"NATS port {made.port} on 127.0.0.1 is taken"):
            await nats_server.start(run_dir, port=made.port, prefix="finback", name="test")
