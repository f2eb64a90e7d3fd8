"""How much later than the engine made them tokens reach the clients, with many streams at once.

Starts a NATS server, the real router, the echo engine (a token a stream and step) and a gateway;
200 clients in another process read streams of 50 tokens/s each over raw sockets. A token's delay is
from its publishing by the engine to the arrival of its text at the client, bus included. The text
is digits, one token each, so characters count tokens. One JSON line goes to results/.

    python benchmarks/codec/gateway_streams.py [--streams 200] [--rate 50] [--seconds 20]
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvloop

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / ".src")]

from support.gateway_stack import GatewayStack
from support.nats_server import NatsServer

# Tokens of a stream's first second and last are not counted: all streams start and end there.
EDGE_S: Final = 1.0
TIMER_S: Final = 0.005
CONTENT: Final = re.compile(rb'"delta":\{"content":"([0-9]*)"')
FIELDS_OF_STAT: Final = (11, 12)


class Stream(asyncio.Protocol):
    """One request; notes when how many characters had arrived."""

    def __init__(self, request: bytes, request_id: str) -> None:
        self.request_id = request_id
        self.arrivals: list[tuple[int, float]] = []
        self.num_chars = 0
        self.is_done = asyncio.get_running_loop().create_future()
        self.is_whole = False
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        # A record is written whole, and much smaller than what the kernel cuts at.
        new = sum(map(len, CONTENT.findall(data)))
        if new:
            self.num_chars += new
            self.arrivals.append((self.num_chars, time.monotonic()))
        if b"[DONE]" in data:
            self.is_whole = True
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self.is_done.done():
            self.is_done.set_result(None)


async def read_streams(port: int, num_streams: int, num_tokens: int) -> dict[str, Any]:
    """All streams, begun over one second."""
    loop = asyncio.get_running_loop()
    streams: list[Stream] = []
    late_ms: list[float] = []
    for at in range(num_streams):
        body = json.dumps(
            {
                "model": "gpt-4o",
                "messages": [{"role": "user", "content": "1234567890" * 5}],
                "stream": True,
                "max_completion_tokens": num_tokens,
                "ignore_eos": True,
            }
        ).encode()
        name = f"stream-{at}"
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: {name}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request = head.encode() + body
        stream = Stream(request, name)
        await loop.create_connection(partial(_given, stream), "127.0.0.1", port)
        streams.append(stream)
        await asyncio.sleep(1 / num_streams)
    watch = asyncio.create_task(lateness(late_ms))
    await asyncio.wait([stream.is_done for stream in streams], timeout=120)
    watch.cancel()
    return {
        "streams": [
            {"id": s.request_id, "is_whole": s.is_whole, "arrivals": s.arrivals} for s in streams
        ],
        "late_ms": sorted(late_ms),
    }


async def lateness(late_ms: list[float]) -> None:
    """How late timers ring in this process: what a busy machine adds by itself."""
    while True:
        due_s = time.monotonic() + TIMER_S
        await asyncio.sleep(TIMER_S)
        late_ms.append(1000 * (time.monotonic() - due_s))


def _given(stream: Stream) -> Stream:
    return stream


def client(port: int, num_streams: int, num_tokens: int) -> None:
    """The other process: its result is one JSON document."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(read_streams(port, num_streams, num_tokens))
    json.dump(found, sys.stdout)


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(fields[at]) for at in FIELDS_OF_STAT) / os.sysconf("SC_CLK_TCK")


def delays_ms(times: Path, found: list[dict[str, Any]], rate: float) -> list[float]:
    """Of every token that is counted: its arrival less its publishing, sorted."""
    published: dict[str, dict[int, float]] = {}
    for line in times.read_text().splitlines():
        name, offset, at_s = line.split()
        name = name.partition("~")[0]  # as the client knows it
        published.setdefault(name, {})[int(offset)] = float(at_s)
    delays: list[float] = []
    edge = int(EDGE_S * rate)
    for stream in found:
        made = published[stream["id"]]
        begin = 0
        for num_chars, arrived_s in stream["arrivals"]:
            counted = range(max(begin, edge), min(num_chars, len(made) - edge))
            delays.extend(1000 * (arrived_s - made[offset]) for offset in counted)
            begin = num_chars
    return sorted(delays)


def quantile(values: list[float], share: float) -> float:
    """By rank."""
    return round(values[min(len(values) - 1, int(share * len(values)))], 2) if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)  # the port, in the other one
    options = parser.parse_args()
    num_tokens = int(options.rate * options.seconds)
    if options.client:
        client(options.client, options.streams, num_tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        env = {
            "ECHO_STEP_MS": str(1000 / options.rate),
            "ECHO_TIMES": str(times),
            "FINBACK_LOG_LEVEL": "warning",
        }
        server = NatsServer(folder=Path(folder) / "nats")
        server.start()
        stack = GatewayStack(server.url, "streams", Path(folder), env)
        try:
            stack.start()
            pids = {name: process.pid for name, process in stack.processes.items()}
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            begun_s = time.monotonic()
            arguments = ["--client", str(stack.port), "--streams", str(options.streams)]
            arguments += ["--rate", str(options.rate), "--seconds", str(options.seconds)]
            done = subprocess.run(
                [sys.executable, __file__, *arguments], capture_output=True, check=True
            )
            took_s = time.monotonic() - begun_s
            cpu = {name: round((cpu_s(p) - before[name]) / took_s, 3) for name, p in pids.items()}
        finally:
            stack.stop()
            server.kill()
        answer = json.loads(done.stdout)
        found = answer["streams"]
        delays = delays_ms(times, found, options.rate)
    arrivals = sum(len(stream["arrivals"]) for stream in found)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    line = {
        "benchmark": "gateway_streams",
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "num_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "num_streams": options.streams,
        "num_whole": sum(stream["is_whole"] for stream in found),
        "rate": options.rate,
        "num_tokens": len(delays),
        "tokens_per_write": round(
            sum(stream["arrivals"][-1][0] for stream in found if stream["arrivals"]) / arrivals, 2
        ),
        "seconds": round(took_s, 1),
        "delay_ms": {str(q): quantile(delays, q) for q in (0.5, 0.9, 0.99, 0.999)},
        # What timers of the client were late meanwhile: the machine's own share, about.
        "timer_late_ms": {str(q): quantile(answer["late_ms"], q) for q in (0.5, 0.99)},
        "cpu": cpu,
    }
    print(json.dumps(line))
    with (ROOT / "benchmarks" / "results" / "gateway_streams.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
