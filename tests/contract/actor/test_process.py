"""The router as a real process: how it starts, ends, and what it says when it cannot."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import NotFound, ServingError
from finback.shared.wire import codec
from finback.shared.wire.messages.control import DrainCommand, PingReply, PingRequest
from finback.shared.wire.messages.prefill import Ack
from finback.shared.wire.messages.route import RouteReply, RouteRequest
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer

pytestmark = pytest.mark.nats


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server without any other service: all that are on one answer to `$SRV`."""
    server = NatsServer(folder=tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@contextmanager
def router(
    url: str, folder: Path, prefix: str, *args: str, **settings: str
) -> Iterator["subprocess.Popen[str]"]:
    """`python -m finback.services.router`, killed at the end if it still runs."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FINBACK_")}
    told = {"nats_url": url, "run_dir": str(folder), "subject_prefix": prefix, **settings}
    env = {f"FINBACK_{name.upper()}": value for name, value in told.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "finback.services.router", *args],
        env={**clean, **env},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@asynccontextmanager
async def client_of(url: str, prefix: str) -> AsyncIterator[Client]:
    bus = await connect(BusSettings(url=url))
    try:
        yield Client(bus, Subjects(prefix))
    finally:
        await bus.close()


async def _instance(client: Client, timeout_s: float = 15) -> str:
    """Wait until a router serves; its instance id."""
    end_s = time.monotonic() + timeout_s
    request = RouteRequest(request_id="r", model="nothing", num_prompt_tokens=1, max_tokens=1)
    while time.monotonic() < end_s:
        try:
            await client.call(
                client.subjects.service("router", "route"), request, RouteReply, timeout_s=1
            )
        except NotFound:
            break
        except ServingError:
            await asyncio.sleep(0.02)
    async with asyncio.timeout(5):
        while True:
            raw = await client.bus.request("$SRV.PING.router", b"", timeout_s=1)
            told = json.loads(raw.data)
            if told["metadata"]["state"] == "serving":
                return str(told["id"])


async def test_it_starts_soon_stays_small_and_drains(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    async with client_of(nats_server.url, subject_prefix) as client:
        begun = time.monotonic()
        with router(nats_server.url, tmp_path, subject_prefix) as process:
            instance = await _instance(client)
            # One second when alone; others share this machine.
            assert time.monotonic() - begun < 10
            assert _pss_bytes(process.pid) < 120 * 2**20
            ping = client.subjects.instance("router", instance, "ping")
            reply = await client.call(ping, PingRequest(), PingReply, timeout_s=2)
            assert reply.state == "serving"
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            with pytest.raises(ServingError):
                await client.call(ping, PingRequest(), PingReply, timeout_s=1)


async def test_service_protocol_as_standard_tools_read_it(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    async with client_of(nats_server.url, subject_prefix) as client:
        with router(nats_server.url, tmp_path, subject_prefix):
            instance = await _instance(client)
            for suffix in ("", ".router", f".router.{instance}"):
                raw = await client.bus.request(f"$SRV.PING{suffix}", b"", timeout_s=2)
                assert ServicePing.from_dict(json.loads(raw.data)).id == instance
                raw = await client.bus.request(f"$SRV.INFO{suffix}", b"", timeout_s=2)
                info = ServiceInfo.from_dict(json.loads(raw.data))
                subjects = {endpoint.subject for endpoint in info.endpoints}
                assert client.subjects.service("router", "route") in subjects
                assert client.subjects.instance("router", instance, "ping") in subjects
                raw = await client.bus.request(f"$SRV.STATS{suffix}", b"", timeout_s=2)
                stats = ServiceStats.from_dict(json.loads(raw.data))
                route = next(e for e in stats.endpoints if e.name == "router-route")
                assert route.num_requests >= 1
                assert route.num_errors >= 1
                assert route.last_error is not None
                assert route.last_error.startswith("404:")
            assert json.loads(raw.data)["endpoints"][0]["data"]["metrics"]


async def test_a_caller_s_trace_goes_on_whatever_its_headers(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    good, quiet = f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-00"
    sent = [
        {"traceparent": good, "tracestate": f"v={'x' * 32_000}"},
        {"traceparent": quiet},
        {"traceparent": "garbage"},
        {},
    ]
    request = RouteRequest(request_id="r", model="nothing", num_prompt_tokens=1, max_tokens=1)
    async with client_of(nats_server.url, subject_prefix) as client:
        with router(nats_server.url, tmp_path, subject_prefix) as process:
            await _instance(client)
            subject = client.subjects.service("router", "route")
            for headers in sent:
                headers["Finback-Request-Id"] = "r-1"
                with pytest.raises(NotFound):
                    await client.bus.request(subject, codec.encode(request), headers, timeout_s=2)
            process.terminate()
            await asyncio.to_thread(process.wait, 10)
    (file,) = (tmp_path / "traces").glob("router-*.jsonl")
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    ours = [s for s in spans if s["attributes"]["finback.request_id"] == "r-1"]
    assert [s["name"] for s in ours] == ["router route"] * 2, "not the unsampled, nor the bare one"
    assert (ours[0]["trace_id"], ours[0]["parent_id"]) == ("a" * 32, "b" * 16)
    assert ours[1]["parent_id"] == ""
    assert ours[0]["attributes"]["error.type"] == "not_found"


async def test_without_jetstream_it_serves_and_says_so(tmp_path: Path, subject_prefix: str) -> None:
    server = NatsServer(folder=tmp_path / "nats", has_jetstream=False)
    server.start()
    try:
        async with client_of(server.url, subject_prefix) as client:
            with router(server.url, tmp_path, subject_prefix) as process:
                instance = await _instance(client)
                metrics = client.subjects.instance("router", instance, "metrics")
                text = (await client.bus.request(metrics, b"", timeout_s=2)).data
                assert b"finback_registry_up 0.0" in text
                process.terminate()
                _, err = await asyncio.to_thread(process.communicate, None, 10)
                assert err.count("registry unavailable") == 1
                assert err.count("cannot watch") == 1
                assert process.returncode == 0
    finally:
        server.stop()


async def test_drain_can_be_asked_for(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    async with client_of(nats_server.url, subject_prefix) as client:
        with router(nats_server.url, tmp_path, subject_prefix) as process:
            instance = await _instance(client)
            drain = client.subjects.instance("router", instance, "drain")
            assert await client.call(drain, DrainCommand(), Ack, timeout_s=2) == Ack()
            assert process.wait(10) == 0


async def test_the_first_signal_drains_the_second_stops(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    async with client_of(nats_server.url, subject_prefix) as client:
        with slow_service(nats_server.url, tmp_path, subject_prefix) as process:
            subject = client.subjects.service("slow", "wait")
            asked = asyncio.create_task(_retried(client, subject))
            await asyncio.sleep(0)
            assert process.stderr is not None
            await asyncio.to_thread(process.stderr.readline)  # "taken"
            process.send_signal(signal.SIGINT)
            await asyncio.sleep(0.5)
            assert process.poll() is None, "drains"
            begun = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 5) == 128 + signal.SIGINT
            assert time.monotonic() - begun < 2
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


async def test_the_drain_deadline_tells_callers_and_ends(
    nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    async with client_of(nats_server.url, subject_prefix) as client:
        settings = {"drain_timeout_s": "0.3"}
        with slow_service(nats_server.url, tmp_path, subject_prefix, **settings) as process:
            subject = client.subjects.service("slow", "wait")
            asked = asyncio.create_task(_retried(client, subject))
            assert process.stderr is not None
            await asyncio.to_thread(process.stderr.readline)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ServingError, match="slow wait stops"):
                await asked
            assert await asyncio.to_thread(process.wait, 5) == 0


def test_a_wrong_setting_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for settings, words in (
        ({"max_queue": "0"}, "max_queue must be at least 1"),
        ({"max_qeue": "5"}, "did you mean FINBACK_MAX_QUEUE?"),
        ({"nats_url": ""}, "set FINBACK_NATS_URL"),
        ({"otlp_endpoint": "http://127.0.0.1:1", "nats_url": ""}, "finback"),
    ):
        url = settings.pop("nats_url", "nats://127.0.0.1:1")
        with router(url, tmp_path, "x", **settings) as process:
            _, err = process.communicate(timeout=15)
            assert process.returncode == 2, err
            assert words in err
            assert err.count("\n") == 1, err


async def test_a_connection_closed_for_good_ends_the_process(
    own_nats_server: NatsServer, tmp_path: Path, subject_prefix: str
) -> None:
    async with client_of(own_nats_server.url, subject_prefix) as client:
        with slow_service(own_nats_server.url, tmp_path, subject_prefix) as process:
            with pytest.raises(ServingError):
                await _retried(client, client.subjects.service("slow", "overflow"), timeout_s=2)
            _, err = await asyncio.to_thread(process.communicate, None, 10)
            assert process.returncode == 1
            assert "closed for good" in err
            assert "service failed" in err


@contextmanager
def slow_service(
    url: str, folder: Path, prefix: str, **settings: str
) -> Iterator["subprocess.Popen[str]"]:
    """See `support/slow_service.py`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FINBACK_")}
    told = {"nats_url": url, "run_dir": str(folder), "subject_prefix": prefix, **settings}
    env = {f"FINBACK_{name.upper()}": value for name, value in told.items()}
    script = Path(__file__).parents[2] / "support" / "slow_service.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**clean, **env, "FINBACK_LOG_LEVEL": "warning"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def _retried(client: Client, subject: str, timeout_s: float = 20) -> PingReply:
    """Ask until somebody listens."""
    while True:
        try:
            return await client.call(subject, PingRequest(), PingReply, timeout_s=timeout_s)
        except ServingError as error:
            if error.reason != "no_responders":
                raise
            await asyncio.sleep(0.02)


def _pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss line")
