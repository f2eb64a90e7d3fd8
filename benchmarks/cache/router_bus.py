"""Over the bus: a real NATS server and router process, 8 workers and 2 caches as processes that tell of 6,577
blocks each and of changes 20 times a second. Requests of 55,000 tokens (859 hashes) arrive 100 times
a second at random; each sends a prompt of 220 KB to the prefill instance that it was given, as a
gateway does. The added time is what the `route` call takes; a ping of the router behind it shows what
of that is the machine, the bus and the event loop.
"""

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cache.router_shapes import NUM_BLOCKS, NUM_DOCUMENTS, NUM_WORKERS, document

from finback.shared.actor.bus import Bus
from finback.shared.actor.client import Client
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.errors import ServingError
from finback.shared.telemetry.metrics import Metrics
from finback.shared.wire.messages.control import PingReply, PingRequest
from finback.shared.wire.messages.route import RequestEnded, RouteReply, RouteRequest
from finback.shared.wire.subjects import Subjects
from support.nats_server import NatsServer
from support.service_process import ServiceProcess

SUBJECTS = Subjects()
ROUTER = "router-0"
NUM_CACHES = 2
MODEL = "m"


async def bus(seconds: float) -> dict[str, Any]:
    """Arrivals at a router process."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        server = NatsServer(folder=Path(name) / "nats")
        server.start()
        stack.callback(server.stop)
        env = {
            "PYTHONPATH": os.pathsep.join(sys.path),
            "FINBACK_NATS_URL": server.url,
            "FINBACK_STACK_ID": "bench",
            "FINBACK_RUN_DIR": name,
            "FINBACK_MODEL_NAME": MODEL,
            "FINBACK_INSTANCE": ROUTER,
        }
        for number in range(NUM_WORKERS):
            stack.callback(_end, _peer("decode", number, env))
        for number in range(NUM_CACHES):
            stack.callback(_end, _peer("cache", number, env))
        router = ServiceProcess("router", env).start()
        stack.callback(router.stop)
        return await _measure(server.url, router.pid, seconds)


def _peer(kind: str, number: int, env: dict[str, str]) -> "subprocess.Popen[bytes]":
    more = {"FINBACK_INSTANCE": f"{kind}-{number}", "PEER_NUMBER": str(number)}
    command = [sys.executable, str(Path(__file__).with_name("router_peer.py")), kind]
    return subprocess.Popen(command, env={**os.environ, **env, **more}, stderr=subprocess.DEVNULL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


class Gateway:
    """What a gateway does to place a request, and the times it takes."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._client = Client(bus, SUBJECTS)
        self._documents = [document(at) for at in range(NUM_DOCUMENTS)]
        self._prompt = random.Random(5).randbytes(220_000)
        self.routes_s: list[float] = []
        self.pings_s: list[float] = []
        self.reasons: list[str] = []

    async def ask(self, at: int, *, is_counted: bool = True) -> RouteReply:
        """One request: route, send its prompt, ping, end."""
        hashes = self._documents[at * 7 % NUM_DOCUMENTS]
        if at % 2:  # a question about a document that nobody has asked yet
            hashes = hashes[: 32 * 800] + random.Random(at).randbytes(32 * 59)
        request = RouteRequest(
            request_id=f"r{at}",
            model=MODEL,
            num_prompt_tokens=NUM_BLOCKS * 64 + 24,
            max_tokens=256,
            block_hashes=hashes,
            tenant="t",
        )
        begun = time.perf_counter()
        reply = await self._client.call(
            SUBJECTS.service("router", "route"), request, RouteReply, timeout_s=5.0
        )
        routed = time.perf_counter()
        subject = SUBJECTS.instance("prefill", reply.prefill_instance, "generate")
        await self._bus.publish(subject, self._prompt)
        pinged = time.perf_counter()
        router = SUBJECTS.instance("router", ROUTER, "ping")
        await self._client.call(router, PingRequest(), PingReply, timeout_s=5.0)
        if is_counted:
            self.routes_s.append(routed - begun)
            self.pings_s.append(time.perf_counter() - pinged)
            self.reasons.append(reply.reason)
        await asyncio.sleep(0.5)
        ended = RequestEnded(
            request_id=request.request_id, attempt=1, decode_instance=reply.decode_instance
        )
        await self._client.publish(SUBJECTS.event("gateway", "request-ended"), ended)
        return reply


async def _measure(url: str, router_pid: int, seconds: float) -> dict[str, Any]:
    bus = await connect(BusSettings(url=url, name="bench"), Metrics())
    gateway = Gateway(bus)
    await _warm(gateway)
    rng, tasks, at = random.Random(11), set[asyncio.Task[RouteReply]](), 1_000
    begun_cpu, begun = _cpu_s(router_pid), time.perf_counter()
    next_s = begun
    while time.perf_counter() - begun < seconds:
        task = asyncio.create_task(gateway.ask(at))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        at += 1
        next_s += rng.expovariate(100.0)
        await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
    cpu = (_cpu_s(router_pid) - begun_cpu) / (time.perf_counter() - begun)
    await asyncio.gather(*tasks)
    await bus.close()
    return {
        "what": "bus",
        "arrivals_per_s": round((at - 1_000) / seconds, 1),
        "num_hashes": NUM_BLOCKS,
        **_percentiles("route", gateway.routes_s),
        **_percentiles("ping", gateway.pings_s),
        "share_with_hit": round(
            sum(not r.startswith("no hit") for r in gateway.reasons) / len(gateway.reasons), 3
        ),
        "router_cpu": round(cpu, 3),
        "router_rss_mb": _rss_mb(router_pid),
    }


async def _warm(gateway: Gateway) -> None:
    """Until the router knows what all peers hold."""
    for at in range(100):
        await asyncio.sleep(0.1)
        with contextlib.suppress(ServingError):
            replies = await asyncio.gather(
                *(gateway.ask(2 * at + i * 1_000_000, is_counted=False) for i in range(4))
            )
            if all(not r.reason.startswith("no hit") for r in replies) and at > 20:
                return
    raise RuntimeError("the router does not learn what its peers hold")


def _percentiles(name: str, times_s: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times_s, n=100)
    return {
        f"{name}_p50_ms": round(cuts[49] * 1e3, 3),
        f"{name}_p99_ms": round(cuts[98] * 1e3, 3),
        f"{name}_max_ms": round(max(times_s) * 1e3, 3),
    }


def _rss_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
