"""A bus inside one process, for unit tests only: same contract as `NatsBus`, no server."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from finback.shared.actor.bus import Message, MessageCallback, check_message
from finback.shared.actor.envelope import error_of
from finback.shared.errors import DeadlineExceeded, Unavailable

_NO_HEADERS: Final[Mapping[str, str]] = {}


@dataclass(slots=True, eq=False)
class _Interest:
    tokens: tuple[str, ...]
    callback: MessageCallback
    queue: str | None
    owner: "LocalBus"
    is_open: bool = True


def matches(pattern: tuple[str, ...], tokens: tuple[str, ...]) -> bool:
    """NATS subject matching: `*` is one token, a last `>` one or more."""
    for i, part in enumerate(pattern):
        if part == ">":
            return len(tokens) > i
        if i >= len(tokens) or part not in ("*", tokens[i]):
            return False
    return len(pattern) == len(tokens)


@dataclass(slots=True)
class LocalBroker:
    """Where several `LocalBus` meet. `max_payload` in bytes, as a server's."""

    max_payload: int = 2**20
    interests: list[_Interest] = field(default_factory=list)
    tasks: set[asyncio.Future[None]] = field(default_factory=set)

    def route(self, message: Message) -> int:
        """Hand a message to everybody interested, one a queue group; return to how many."""
        tokens = tuple(message.subject.split("."))
        found = [i for i in self.interests if i.is_open and matches(i.tokens, tokens)]
        groups: dict[tuple[tuple[str, ...], str], list[_Interest]] = {}
        chosen = [i for i in found if i.queue is None]
        for interest in found:
            if interest.queue is not None:
                groups.setdefault((interest.tokens, interest.queue), []).append(interest)
        chosen += [random.choice(members) for members in groups.values()]
        for interest in chosen:  # in a task, as a callback of the real bus runs in one
            task = asyncio.ensure_future(_deliver(interest, message))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return len(chosen)


async def _deliver(interest: _Interest, message: Message) -> None:
    if interest.is_open:
        interest.callback(message)


class _LocalSubscription:
    def __init__(self, broker: LocalBroker, interest: _Interest) -> None:
        self._broker = broker
        self._interest = interest

    async def drain(self) -> None:
        if self._interest in self._broker.interests:
            self._broker.interests.remove(self._interest)
        await asyncio.sleep(0)  # what is on its way arrives
        self._interest.is_open = False

    async def unsubscribe(self) -> None:
        self._interest.is_open = False
        if self._interest in self._broker.interests:
            self._broker.interests.remove(self._interest)


class LocalBus:
    """See `Bus`. Buses that share a `LocalBroker` hear each other."""

    def __init__(self, broker: LocalBroker | None = None) -> None:
        self.broker = broker or LocalBroker()
        self._counter = itertools.count(1)
        self._is_closed = False
        self._on_reconnect: list[Callable[[], Awaitable[None]]] = []
        self._on_closed: list[Callable[[str], None]] = []

    @property
    def max_payload(self) -> int:
        return self.broker.max_payload

    @property
    def is_connected(self) -> bool:
        return not self._is_closed

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def url(self) -> str:
        return "local:"

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_reconnect.append(callback)

    def on_closed(self, callback: Callable[[str], None]) -> None:
        self._on_closed.append(callback)

    def new_inbox(self) -> str:
        return f"_INBOX.local.{id(self)}-{next(self._counter)}"

    async def reconnect(self) -> None:
        """Do what a bus does after a reconnect (for tests)."""
        for callback in self._on_reconnect:
            await callback()

    async def publish(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        reply: str | None = None,
    ) -> None:
        self._check(subject, body, headers)
        self.broker.route(Message(subject, bytes(body), dict(headers or _NO_HEADERS), reply))

    async def request(
        self,
        subject: str,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Message:
        self._check(subject, body, headers)
        inbox = self.new_inbox()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def answered(message: Message) -> None:
            if not future.done():
                future.set_result(message)

        subscription = await self.subscribe(inbox, answered)
        try:
            sent = Message(subject, bytes(body), dict(headers or _NO_HEADERS), inbox)
            if self.broker.route(sent) == 0:
                raise Unavailable(f"nobody answers on {subject}", reason="no_responders")
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            raise DeadlineExceeded(f"no answer from {subject} within {timeout_s:g} s") from None
        finally:
            await subscription.unsubscribe()
        error = error_of(reply.headers)
        if error is not None:
            raise error
        return reply

    async def subscribe(
        self, subject: str, callback: MessageCallback, *, queue: str | None = None
    ) -> _LocalSubscription:
        if self._is_closed:
            raise Unavailable(f"cannot subscribe to {subject}: closed", reason="bus")
        interest = _Interest(tuple(subject.split(".")), callback, queue, self)
        self.broker.interests.append(interest)
        return _LocalSubscription(self.broker, interest)

    async def flush(self) -> None:
        if self._is_closed:
            raise Unavailable("the bus connection is closed", reason="bus")
        await asyncio.sleep(0)

    async def close(self) -> None:
        self._is_closed = True
        mine = [i for i in self.broker.interests if i.owner is self]
        for interest in mine:
            interest.is_open = False
            self.broker.interests.remove(interest)

    def _check(self, subject: str, body: bytes, headers: Mapping[str, str] | None) -> None:
        if self._is_closed:
            raise Unavailable(f"bus cannot send to {subject}: closed", reason="bus")
        check_message(subject, body, headers, self.max_payload)
