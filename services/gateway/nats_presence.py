"""Is the client of a stream still there: the server says so when nobody hears a message.

Now and then a message of a stream carries a reply subject of ours. Where it finds no subscriber,
the server answers on that subject with the status "no responders"; nobody else ever does.
"""

import itertools
from collections.abc import Callable
from typing import Final

from finback.shared.actor.bus import Bus, Message
from finback.shared.clock import monotonic_s

ASK_EVERY_S: Final = 1.0
_STATUS: Final = "Status"
_NOBODY: Final = "503"


class Asking:
    """One stream: when to ask, and where the answer goes."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._asked_s = -ASK_EVERY_S

    def reply(self) -> str | None:
        """The reply subject of the next message; None most of the time."""
        now_s = monotonic_s()
        if now_s - self._asked_s < ASK_EVERY_S:
            return None
        self._asked_s = now_s
        return self.subject


class Presence:
    """Tells streams apart by the last part of the reply subject."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.new_inbox()
        self._numbers = itertools.count(1)
        self._leaving: dict[str, Callable[[], None]] = {}

    async def start(self) -> None:
        """Listen, as long as the connection lives."""
        await self._bus.subscribe(f"{self._inbox}.*", self._answered)

    def watch(self, on_gone: Callable[[], None]) -> Asking:
        """A stream begins; `on_gone` is called, at most once, when its client has left."""
        asking = Asking(f"{self._inbox}.{next(self._numbers)}")
        self._leaving[asking.subject] = on_gone
        return asking

    def forget(self, asking: Asking) -> None:
        """The stream is over."""
        self._leaving.pop(asking.subject, None)

    def _answered(self, message: Message) -> None:
        if message.headers.get(_STATUS) != _NOBODY:
            return
        on_gone = self._leaving.pop(message.subject, None)
        if on_gone is not None:
            on_gone()
