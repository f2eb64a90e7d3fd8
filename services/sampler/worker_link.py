"""The service's end of one worker: frames out, answers in, and how long it has been at one row."""

import asyncio
import json
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from finback.services.sampler import frames
from finback.shared.clock import monotonic_s
from finback.shared.errors import Unavailable
from finback.shared.wire import codec
from finback.shared.wire.messages.sampler import Mask, MaskRequest, MaskRow


class WorkerLost(Unavailable):
    """The worker ended (it was killed, ran out of memory or crashed) before it answered."""


@dataclass(eq=False, slots=True)
class Pending:
    """A row that is with a worker: its answer, and whose grammar it is about."""

    row: MaskRow
    answer: "asyncio.Future[Mask]"

    def is_for(self, row: MaskRow) -> bool:
        """Does its answer fit a row that is asked again: same grammar, same number of tokens."""
        mine = self.row.position + len(self.row.token_ids) // 4
        theirs = row.position + len(row.token_ids) // 4
        return (self.row.grammar_id, mine) == (row.grammar_id, theirs)

    def settle(self, mask: Mask) -> None:
        """Its answer, unless it has one."""
        if not self.answer.done():
            self.answer.set_result(mask)


@dataclass(slots=True)
class _Progress:
    """When the worker last began something, by its processor's clock and by the wall's."""

    cpu_s: float = 0.0
    wall_s: float = field(default_factory=monotonic_s)


class WorkerLink(asyncio.Protocol):
    """One worker. `grammars` are those it has been given; `on_lost` is called once, at its end."""

    def __init__(self, on_lost: Callable[["WorkerLink"], None]) -> None:
        self.pid = 0
        self.born_bytes = 0
        self.grammars: set[str] = set()
        self.pending: deque[Pending] = deque()
        self.is_lost = False
        self.num_answered = 0
        self._on_lost = on_lost
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verdict: asyncio.Future[dict[str, Any]] | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._outbox: list[tuple[tuple[str, int], MaskRow]] = []
        self._progress = _Progress()

    @classmethod
    async def open(
        cls, connection: socket.socket, on_lost: Callable[["WorkerLink"], None], timeout_s: float
    ) -> "WorkerLink":
        """Returns when the worker has said that it is there. Raises `WorkerLost`."""
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        _, link = await loop.create_connection(lambda: cls(on_lost), sock=connection)
        try:
            await asyncio.wait_for(link._hello, timeout_s)
        except TimeoutError:
            link.close()
            raise WorkerLost("a grammar worker does not start") from None
        return link

    # -- what the service asks

    async def compile(self, grammar_id: str, told: dict[str, Any]) -> dict[str, Any]:
        """The worker's verdict on a grammar, one at a time. Raises `WorkerLost`."""
        self._verdict = asyncio.get_running_loop().create_future()
        self._begin()
        self._write(frames.pack_json(frames.COMPILE, {"grammar_id": grammar_id, **told}))
        try:
            verdict = await self._verdict
        finally:
            self._verdict = None
        if "error" not in verdict:
            self.grammars.add(grammar_id)
        return verdict

    def load(self, grammar_id: str, engine_text: str) -> None:
        """Give it a grammar that was found to be good, unless it has it."""
        if grammar_id not in self.grammars:
            self._flush()
            self.grammars.add(grammar_id)
            told = {"grammar_id": grammar_id, "text": engine_text}
            self._write(frames.pack_json(frames.LOAD, told))

    def drop(self, grammar_id: str) -> None:
        """It may forget a grammar; sequences that are in it go on."""
        if grammar_id in self.grammars:
            self.grammars.discard(grammar_id)
            self._write(frames.pack_json(frames.DROP, {"grammar_id": grammar_id}))

    def ask(self, caller: tuple[str, int], pending: Pending) -> None:
        """Give it a row. Rows of one turn of the event loop leave together, answers come in order."""
        if self.is_lost:
            raise WorkerLost("a grammar worker has ended")
        if not self.pending:
            self._begin()
        self.pending.append(pending)
        self._outbox.append((caller, pending.row))
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def tell_ended(self, caller: tuple[str, int], ended: tuple[tuple[str, int], ...]) -> None:
        """Sequences are over."""
        self._flush()
        self._write_rows(caller, (), ended)

    def _flush(self) -> None:
        rows, self._outbox = self._outbox, []
        if self.is_lost:
            return
        for caller, group in groupby(rows, key=lambda asked: asked[0]):
            self._write_rows(caller, tuple(row for _, row in group), ())

    def _write_rows(
        self,
        caller: tuple[str, int],
        rows: tuple[MaskRow, ...],
        ended: tuple[tuple[str, int], ...],
    ) -> None:
        request = MaskRequest(instance=caller[0], epoch=caller[1], model="", rows=rows, ended=ended)
        self._write(frames.pack(frames.MASKS, codec.encode(request)))

    # -- how it is doing

    def busy_s(self) -> tuple[float, float]:
        """(processor, wall) seconds since it began what it is at; zeros if it is at nothing."""
        if not self.pending and self._verdict is None:
            return 0.0, 0.0
        cpu_s = self._cpu_s() - self._progress.cpu_s
        return cpu_s, monotonic_s() - self._progress.wall_s

    def close(self) -> None:
        """Let it go; what it has not answered is lost."""
        if self._transport is not None:
            self._transport.abort()
        self._lose()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= frames.HEAD_BYTES:
            size, kind = frames.unpack_head(self._buffer, start)
            end = start + frames.HEAD_BYTES + size
            if len(self._buffer) < end:
                break
            self._take(kind, bytes(memoryview(self._buffer)[start + frames.HEAD_BYTES : end]))
            start = end
        del self._buffer[:start]

    def connection_lost(self, _: Exception | None) -> None:
        self._lose()

    def _take(self, kind: int, body: bytes) -> None:
        if kind == frames.MASK and self.pending:
            pending = self.pending.popleft()
            self.num_answered += 1
            self._begin()
            if not pending.answer.done():
                pending.settle(codec.decode(body, Mask))
        elif kind == frames.COMPILED and self._verdict is not None:
            if not self._verdict.done():
                self._verdict.set_result(json.loads(body))
        elif kind == frames.HELLO and not self._hello.done():
            self.pid = int(json.loads(body)["pid"])
            self._begin()
            self._hello.set_result(None)

    def _begin(self) -> None:
        self._progress = _Progress(self._cpu_s())

    def _cpu_s(self) -> float:
        """The worker's processor time so far; the wall's where the system does not tell."""
        if sys.platform != "linux" or not self.pid:
            return monotonic_s()
        try:
            # What clock_getcpuclockid(3) makes of a process id.
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return self._progress.cpu_s  # it has ended

    def _write(self, data: bytes) -> None:
        if self._transport is None or self.is_lost:
            raise WorkerLost("a grammar worker has ended")
        self._transport.write(data)

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        lost = WorkerLost("a grammar worker has ended")
        for future in (self._hello, self._verdict):
            if future is not None and not future.done():
                future.set_exception(lost)
        if self._hello.done() and not self._hello.cancelled():
            self._hello.exception()  # seen
        self._on_lost(self)
