"""Requests that wait for their answers on one shared wildcard subject. No I/O."""

import asyncio
import itertools

from finback.shared.actor.bus import Message
from finback.shared.errors import Unavailable


class ReplyInbox:
    """Hands out a reply subject a request, and the answer to whoever waits for it."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._tokens = itertools.count(1)
        self._waiting: dict[str, asyncio.Future[Message]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def pattern(self) -> str:
        """What to subscribe `answered` to."""
        return f"{self.prefix}.*"

    def open(self) -> tuple[str, "asyncio.Future[Message]"]:
        """A fresh reply subject and the future of its answer; `close` it in the end."""
        subject = f"{self.prefix}.{next(self._tokens)}"
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = future
        return subject, future

    def close(self, subject: str) -> None:
        """Whatever still comes is ignored."""
        self._waiting.pop(subject, None)

    def answered(self, message: Message) -> None:
        """Take a message; the first one a subject counts."""
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)

    def fail_all(self, why: str) -> None:
        """Answers are lost with the connection: core NATS delivers at most once."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(why, reason="bus"))
