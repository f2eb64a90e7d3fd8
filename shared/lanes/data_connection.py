"""A connection of lane `nats` alone: two threads beside the event loop, large pieces, few copies.

One thread receives, the other sends; both are nicer than the rest of the process, so that tokens go
first. After a loss it connects again by itself; what was under way is a failure, never a wait.
"""

import asyncio
import contextlib
import itertools
import os
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from anyio import to_thread

from finback.shared.actor.envelope import error_headers, error_of
from finback.shared.actor.nats_bus import BusSettings
from finback.shared.clock import monotonic_s
from finback.shared.errors import DeadlineExceeded, NotFound, ServingError, Unavailable, WireError
from finback.shared.lanes.base import copy_bytes
from finback.shared.lanes.nats_socket import Frame, NatsSocket, Part, parse_headers, publication

NICENESS: Final = 5
WINDOW: Final = 4  # pieces under way at once, a get
_MAX_OUTBOX: Final = 2048
_STALE_S: Final = 5.0  # the asker of a piece has given up by then
_OPEN_TIMEOUT_S: Final = 10.0
_SUBJECT: Final = re.compile(r"^[^\s.*>]{1,128}(\.[^\s.*>]{1,128}){0,15}\Z")
_INBOX_SID: Final = 1
_SERVED_SID: Final = 2

# What to answer to the body of a request. Runs on the receiving thread; raises `ServingError`.
Answer = Callable[[bytes | memoryview], Part]
# The body of a request for `length` bytes from `offset` on.
Ask = Callable[[int, int], bytes]


@dataclass(slots=True, eq=False)
class _Fetch:
    """One get under way. `view` is written only while `is_over` is False, under the lock."""

    subject: str
    view: memoryview
    step: int
    ask: Ask
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"
    next_offset: int = 0
    num_open: int = 0
    num_pieces: int = 0
    is_over: bool = False
    tokens: set[str] = field(default_factory=set)

    def end(self, error: ServingError | None) -> None:
        """Tell the waiting task; from any thread."""
        self.is_over = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(_settle, self.done, error)


def _settle(done: "asyncio.Future[None]", error: ServingError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class DataConnection:
    """See above. `subject` is served with `answer`; "" serves nothing."""

    def __init__(self, settings: BusSettings, subject: str, answer: Answer) -> None:
        self._settings = settings
        self._subject = subject
        self._answer = answer
        owner = re.sub(r"[^A-Za-z0-9_-]", "_", settings.user or settings.name)
        self._inbox = f"_INBOX.{owner}.{settings.name}.{secrets.token_hex(6)}.d"
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._expected: dict[str, tuple[_Fetch, int, int]] = {}
        self._outbox: deque[tuple[float, Sequence[Part]]] = deque()
        self._has_mail = threading.Condition()
        self._socket: NatsSocket | None = None
        self._ready = threading.Event()
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._opening = asyncio.Lock()
        self.num_losses = 0

    @property
    def max_payload(self) -> int:
        """Largest message in bytes."""
        link = self._socket
        return 1 << 20 if link is None else link.max_payload

    # -- life

    async def open(self) -> None:
        """Connect, and keep connected. Raises `Unavailable` when that fails now."""
        async with self._opening:
            if not self._threads and not self._closed.is_set():
                await self._start()

    async def _start(self) -> None:
        await to_thread.run_sync(self._connect)
        for run in (self._receive_forever, self._send_forever):
            thread = threading.Thread(target=run, name=f"nats-data-{run.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()
        if not await to_thread.run_sync(self._ready.wait, _OPEN_TIMEOUT_S):
            await self.close()
            raise Unavailable("the bus did not take a subscription in time", reason="bus")

    async def close(self) -> None:
        """End both threads; what is under way fails."""
        self._closed.set()
        self._drop("the connection is closed")
        with self._has_mail:
            self._has_mail.notify_all()
        for thread in self._threads:
            await to_thread.run_sync(thread.join, _OPEN_TIMEOUT_S)

    # -- getting

    async def fetch(
        self, subject: str, view: memoryview, step: int, ask: Ask, timeout_s: float
    ) -> None:
        """Fill `view` piece by piece from `subject`; at most `timeout_s` without a piece.

        Raises the peer's `ServingError`, `Unavailable`, `DeadlineExceeded`. Nothing writes to `view`
        any more once this returns or is cancelled.
        """
        if not _SUBJECT.match(subject):  # it comes from a ticket, and goes into a line of text
            raise WireError(f"cannot publish on {subject[:80]!r}")
        await self.open()
        loop = asyncio.get_running_loop()
        fetch = _Fetch(subject, view, step, ask, loop, loop.create_future())
        with self._lock:
            for _ in range(WINDOW):
                self._ask_next(fetch)
        try:
            await self._progress(fetch, timeout_s)
        finally:
            with self._lock:
                fetch.is_over = True
                for token in fetch.tokens:
                    self._expected.pop(token, None)
            fetch.done.cancel()

    async def _progress(self, fetch: _Fetch, timeout_s: float) -> None:
        seen = -1
        while seen != fetch.num_pieces:
            seen = fetch.num_pieces
            done, _ = await asyncio.wait([fetch.done], timeout=timeout_s)
            if done:
                fetch.done.result()
                return
        raise DeadlineExceeded(f"no piece from {fetch.subject} within {timeout_s:g} s")

    def _ask_next(self, fetch: _Fetch) -> None:
        """Ask for one more piece; under the lock."""
        offset = fetch.next_offset
        length = min(fetch.step, len(fetch.view) - offset)
        if length <= 0:
            if fetch.num_open == 0:
                fetch.end(None)
            return
        token = f"{next(self._tokens):x}"
        fetch.next_offset += length
        fetch.num_open += 1
        fetch.tokens.add(token)
        self._expected[token] = (fetch, offset, length)
        body = fetch.ask(offset, length)
        if not self._post(publication(fetch.subject, body, reply=f"{self._inbox}.{token}"), True):
            fetch.end(Unavailable("the data connection is busy or away", reason="bus"))

    def _take(self, frame: Frame) -> None:
        """A piece, or an error in its place. What nobody waits for (any more) is dropped."""
        token = frame.subject.rpartition(".")[2]
        with self._lock:
            fetch, offset, length = self._expected.pop(token, (None, 0, 0))
            if fetch is None or fetch.is_over:
                return
            fetch.tokens.discard(token)
            error = _failure(frame, length)
            if error is not None:
                fetch.end(error)
                return
            copy_bytes(fetch.view[offset : offset + length], frame.payload)
            fetch.num_open -= 1
            fetch.num_pieces += 1
            self._ask_next(fetch)

    # -- serving

    def _serve(self, frame: Frame) -> None:
        if not frame.reply:
            return
        try:
            parts = publication(frame.reply, self._answer(frame.payload))
        except ServingError as error:
            parts = publication(frame.reply, b"", headers=error_headers(error))
        self._post(parts, False)  # a full outbox drops it: the asker takes that as a miss

    # -- threads

    def _post(self, parts: Sequence[Part], is_urgent: bool) -> bool:
        with self._has_mail:
            if self._socket is None or len(self._outbox) >= _MAX_OUTBOX:
                return False
            add = self._outbox.appendleft if is_urgent else self._outbox.append
            add((monotonic_s() + _STALE_S, parts))
            self._has_mail.notify()
        return True

    def _send_forever(self) -> None:
        _be_nice()
        while not self._closed.is_set():
            with self._has_mail:
                while not self._outbox and not self._closed.is_set():
                    self._has_mail.wait()
                link = self._socket
                if self._closed.is_set() or not self._outbox:
                    continue
                stale_s, parts = self._outbox.popleft()
            if link is None or stale_s < monotonic_s():
                continue
            try:
                link.send(parts)
            except OSError:
                link.close()  # the receiving thread connects anew

    def _receive_forever(self) -> None:
        _be_nice()
        while not self._closed.is_set():
            link = self._socket
            try:
                if link is None:
                    self._connect()
                    continue
                self._receive(link)
            except (OSError, ValueError, ServingError) as error:
                self._ready.clear()
                self._drop(f"the data connection was lost: {error}")
                self._closed.wait(self._settings.reconnect_wait_s)

    def _receive(self, link: NatsSocket) -> None:
        while True:
            frame = link.receive()
            if frame is None:
                self._ready.set()
            elif frame.subject.startswith(self._inbox):
                self._take(frame)
            else:
                self._serve(frame)

    def _connect(self) -> None:
        urls = self._settings.url.split(",")
        url = urls[self.num_losses % len(urls)].strip()
        try:
            link = NatsSocket(url, self._settings)
        except (OSError, ValueError) as error:
            self.num_losses += 1
            raise Unavailable(f"no NATS server answers at {url}: {error}", reason="bus") from error
        link.subscribe(f"{self._inbox}.*", _INBOX_SID)
        if self._subject:
            link.subscribe(self._subject, _SERVED_SID)
        link.ping()  # its answer says that the subscriptions stand
        with self._has_mail:
            self._socket = link

    def _drop(self, why: str) -> None:
        with self._has_mail:
            link, self._socket = self._socket, None
            self._outbox.clear()
        if link is not None:
            self.num_losses += 1
            link.close()
        with self._lock:
            waiting = {fetch for fetch, _, _ in self._expected.values()}
            self._expected.clear()
            for fetch in waiting:
                fetch.end(Unavailable(why, reason="bus"))


def _failure(frame: Frame, length: int) -> ServingError | None:
    if frame.headers:
        status, headers = parse_headers(frame.headers)
        if status == "503":
            return Unavailable(f"nobody answers for {frame.subject}", reason="no_responders")
        error = error_of(headers)
        if error is not None:
            return error
    if len(frame.payload) != length:
        return NotFound(f"a piece of {len(frame.payload)} bytes instead of {length}")
    return None


def _be_nice() -> None:
    with contextlib.suppress(OSError):  # already nicer than that
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
