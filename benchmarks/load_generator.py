"""Open-loop HTTP load over raw sockets, in a process of its own: one JSON line of results.

Requests start at their scheduled times (Poisson, seeded), whether or not earlier ones are answered,
and are timed from their schedule, not from when they were really sent: a stall counts for everyone
it delays. Nothing is parsed that need not be.

    python benchmarks/load_generator.py HOST PORT RATE SECONDS TOKENS
"""

import asyncio
import json
import random
import resource
import sys
import time
from typing import Final, cast

import uvloop

FIRST_TOKEN: Final = b'"delta":{"content":"'
TIMEOUT_S: Final = 15.0
WARM_UP_S: Final = 2.0
SEED: Final = 7


class Connection(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self, load: "Load") -> None:
        self.load = load
        self.transport: asyncio.Transport | None = None
        self.due_s = 0.0
        self.first_s = 0.0
        self.is_counted = False
        self.received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, due_s: float, *, is_counted: bool) -> None:
        """Send the request whose time has come."""
        self.due_s, self.first_s, self.is_counted = due_s, 0.0, is_counted
        self.received.clear()
        if self.transport is not None:
            self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        if not self.first_s and FIRST_TOKEN in data:
            self.first_s = time.perf_counter()
        self.received += data
        if data.endswith(b"0\r\n\r\n") or not self.received.startswith(b"HTTP/1.1 200"):
            self.load.answered(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.load.lost(self)


class Load:
    """Sends at `rate` and keeps the times."""

    def __init__(self, host: str, port: int, tokens: int) -> None:
        body = json.dumps(
            {
                "model": "gpt-4o",
                "messages": [{"role": "user", "content": "Tell me about the sea, please."}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_completion_tokens": tokens,
                "ignore_eos": True,
            }
        ).encode()
        self.request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.expected = f'"completion_tokens":{tokens},'.encode()
        self.address = (host, port)
        self.idle: list[Connection] = []
        self.open: set[Connection] = set()
        self.first_ms: list[float] = []
        self.total_ms: list[float] = []
        self.late_ms: list[float] = []
        self.errors: dict[str, int] = {}

    async def send(self, due_s: float, *, is_counted: bool) -> None:
        """One request, on an idle connection or a new one."""
        if self.idle:
            connection = self.idle.pop()
        else:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(
                    lambda: Connection(self), *self.address
                )
            except OSError as error:
                self.fail(type(error).__name__)
                return
        self.open.add(connection)
        connection.ask(due_s, is_counted=is_counted)

    def answered(self, connection: Connection) -> None:
        """The answer is whole: check it, note its times."""
        self.open.discard(connection)
        now_s, received = time.perf_counter(), connection.received
        if not received.startswith(b"HTTP/1.1 200"):
            self.fail(received[9:12].decode())
            if connection.transport is not None:
                connection.transport.close()
            return
        if self.expected not in received or b"[DONE]" not in received:
            self.fail("incomplete")
        elif connection.is_counted:
            self.first_ms.append(1000 * (connection.first_s - connection.due_s))
            self.total_ms.append(1000 * (now_s - connection.due_s))
        self.idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """The server closed it."""
        if connection in self.open:
            self.open.discard(connection)
            self.fail("disconnected")
        elif connection in self.idle:
            self.idle.remove(connection)

    def fail(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1


async def run(load: Load, rate: float, seconds: float) -> float:
    """Offer the load; the share of a core that this process used."""
    draw = random.Random(SEED)
    begun_s = time.perf_counter()
    counted_from_s = begun_s + WARM_UP_S
    due_s, tasks = begun_s, set()
    cpu_s = 0.0
    while due_s < counted_from_s + seconds:
        due_s += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        if due_s >= counted_from_s and not cpu_s:
            cpu_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        load.late_ms.append(1000 * (time.perf_counter() - due_s))
        task = asyncio.create_task(load.send(due_s, is_counted=due_s >= counted_from_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    used_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - cpu_s
    end_s = time.perf_counter() + TIMEOUT_S
    while load.open and time.perf_counter() < end_s:  # noqa: ASYNC110 -- a benchmark may poll
        await asyncio.sleep(0.01)
    for _ in load.open:
        load.fail("timeout")
    return used_s / seconds


def quantile(values: list[float], share: float) -> float:
    """By rank; 0 without values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0


def main() -> None:
    host, port, rate, seconds, tokens = sys.argv[1:6]
    load = Load(host, int(port), int(tokens))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        cpu = runner.run(run(load, float(rate), float(seconds)))
    print(
        json.dumps(
            {
                "rate": float(rate),
                "num_ok": len(load.first_ms),
                "errors": load.errors,
                "ttft_p50_ms": quantile(load.first_ms, 0.5),
                "ttft_p99_ms": quantile(load.first_ms, 0.99),
                "ttft_max_ms": quantile(load.first_ms, 1.0),
                "total_p50_ms": quantile(load.total_ms, 0.5),
                "total_p99_ms": quantile(load.total_ms, 0.99),
                "sent_late_p99_ms": quantile(load.late_ms, 0.99),
                "generator_cpu": round(cpu, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
