"""`Idempotency-Key`: the same key and body within ten minutes give the same answer, made once.

A duplicate that comes while the first is running waits for it, or follows its stream. The same key
with another body is refused with 422 (not 409, which clients retry by themselves). Answers that
failed, and those that every client left, are forgotten at once: a retry makes them anew.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from finback.services.gateway.grammar_verdict import WIDENED_HEADER
from finback.services.gateway.sink import Outcome, Sink
from finback.shared.clock import monotonic_s
from finback.shared.errors import Cancelled, InvalidRequest, Overloaded

KEEP_S: Final = 600.0
MAX_RECORDINGS: Final = 1_024
MAX_BYTES: Final = 64 * 2**20
MAX_KEY_CHARS: Final = 255
REPLAYED_HEADERS: Final = frozenset({WIDENED_HEADER})


class KeyReused(InvalidRequest):
    """An idempotency key came again with another body."""

    http_status = 422


@dataclass(slots=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes
    headers: Mapping[str, str]


@dataclass(slots=True)
class Recording:
    """One answer as it is made: a sink for the one who makes it, a source for all who asked.

    `headers`: what is found out for the answer's head while it is made.
    """

    digest: bytes
    at_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    documents: list[bytes] = field(default_factory=list)
    reply_: Reply | None = None
    is_stream: bool = False
    outcome: Outcome | None = None
    error: BaseException | None = None
    is_over: bool = False
    num_bytes: int = 0
    num_readers: int = 0
    maker: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    # -- the sink

    async def reply(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        self.reply_ = Reply(status, body, headers or {})
        self.num_bytes += len(body)
        self._tell()

    async def open_stream(self) -> None:
        self.is_stream = True
        self._tell()

    async def send(self, documents: Sequence[bytes]) -> None:
        self.documents.extend(documents)
        self.num_bytes += sum(map(len, documents))
        self._tell()

    async def keep_alive(self) -> None:
        """Each reader makes its own."""

    async def close_stream(self, final: Outcome) -> None:
        self.outcome = final
        self._tell()

    def _tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # -- the source

    def end(self, error: BaseException | None) -> None:
        """The maker has returned, or failed before it sent anything."""
        self.error = error
        self.is_over = True
        self._tell()

    @property
    def is_whole(self) -> bool:
        return self.is_over or self.outcome is not None or self.reply_ is not None

    @property
    def has_failed(self) -> bool:
        return self.error is not None or self.outcome in ("error", "cancelled")

    async def play(self, sink: Sink, tick_s: float, headers: dict[str, str]) -> None:
        """Send the answer from its beginning, then follow it live to its end.

        `headers` of the sink get what of the answer's head is true whoever reads it.
        """
        position, is_open = 0, False
        while True:
            changed = self.changed
            if self.is_stream or self.reply_ is not None:
                headers.update({k: v for k, v in self.headers.items() if k in REPLAYED_HEADERS})
            if self.is_stream and not is_open:
                is_open = True
                await sink.open_stream()
            if position < len(self.documents):
                batch = self.documents[position:]
                position += len(batch)
                await sink.send(batch)
                continue
            if self.outcome is not None:
                return await sink.close_stream(self.outcome)
            if self.reply_ is not None:
                return await sink.reply(self.reply_.status, self.reply_.body, self.reply_.headers)
            if self.error is not None:
                raise self.error
            if not changed.is_set():
                await self._wait(changed, sink if is_open else None, tick_s)

    async def _wait(self, changed: asyncio.Event, sink: Sink | None, tick_s: float) -> None:
        try:
            async with asyncio.timeout(tick_s):
                await changed.wait()
        except TimeoutError:
            if sink is not None:
                await sink.keep_alive()


class Recordings:
    """Answers by (tenant, endpoint, key), bounded in number, bytes and age."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], Recording] = OrderedDict()

    async def answer(
        self,
        key: tuple[str, str, str],
        digest: bytes,
        make: Callable[[Sink], Coroutine[Any, Any, None]],
        sink: Sink,
        *,
        tick_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        """Make the answer, or play the one that is there already.

        `headers`: of the sink; `make` fills them too.
        """
        headers = {} if headers is None else headers
        if not 0 < len(key[2]) <= MAX_KEY_CHARS:
            raise InvalidRequest(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters")
        self._expire()
        recording = self._kept.get(key)
        if recording is None:
            recording = self._begin(key, digest, make, headers)
        elif recording.digest != digest:
            raise KeyReused(
                "this Idempotency-Key was used with another request",
                reason="idempotency_key_reused",
            )
        recording.num_readers += 1
        try:
            await recording.play(sink, tick_s, headers)
        finally:
            recording.num_readers -= 1
            if recording.num_readers == 0 and not recording.is_whole:
                await self._abandon(key, recording)

    def _begin(
        self,
        key: tuple[str, str, str],
        digest: bytes,
        make: Callable[[Sink], Coroutine[Any, Any, None]],
        headers: Mapping[str, str],
    ) -> Recording:
        recording = self._kept[key] = Recording(digest, monotonic_s(), headers)

        def done(task: asyncio.Task[None]) -> None:
            error = Cancelled("the request was cancelled") if task.cancelled() else task.exception()
            recording.end(error)
            if recording.has_failed:
                self._forget(key, recording)

        recording.maker = asyncio.ensure_future(make(recording))
        recording.maker.add_done_callback(done)
        return recording

    async def _abandon(self, key: tuple[str, str, str], recording: Recording) -> None:
        """Nobody waits any more before it is done: stop making it."""
        self._forget(key, recording)
        if recording.maker is not None:
            recording.maker.cancel()
            await asyncio.wait([recording.maker])

    def _forget(self, key: tuple[str, str, str], recording: Recording) -> None:
        if self._kept.get(key) is recording:
            del self._kept[key]

    def _expire(self) -> None:
        now_s = monotonic_s()
        num_bytes = sum(recording.num_bytes for recording in self._kept.values())
        for key, recording in list(self._kept.items()):
            is_full = len(self._kept) >= MAX_RECORDINGS or num_bytes > MAX_BYTES
            if not is_full and now_s - recording.at_s < KEEP_S:
                break
            if not recording.is_over:
                continue
            num_bytes -= recording.num_bytes
            del self._kept[key]
        if len(self._kept) >= MAX_RECORDINGS:
            raise Overloaded("too many idempotent requests are open", retry_after_s=1.0)
