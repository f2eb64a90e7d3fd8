"""The one thread that computes. Work is done in the order it was given; idle means asleep.

Results come back as callbacks on the event loop, in the same order, so that whoever waits for an
item knows that everything before it has been told as well. On a device that computes by itself, work
only launches: a second thread then waits for what was launched, and the first goes on launching.
"""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_Work = tuple[Callable[[], Any], Callable[[Any], None]]


class Pending(ABC, Generic[T]):
    """A result that the device has yet to bring."""

    @abstractmethod
    def wait(self) -> T:
        """The result; any thread may ask, again and again."""


class DeviceThread:
    """Runs work off the event loop; `on_failure` (on the loop) hears of the exception that ended it.

    `collects`: work may return a `Pending`, of which a second thread tells the result.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        prepare: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        collects: bool = False,
    ) -> None:
        self._loop = loop
        self._prepare = prepare
        self._on_failure = on_failure
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="finback-device", daemon=True)
        self._launched: SimpleQueue[tuple[Any, Callable[[Any], None]] | None] | None = None
        self._collector: threading.Thread | None = None
        if collects:
            self._launched = SimpleQueue()
            self._collector = threading.Thread(
                target=self._collect, name="finback-collect", daemon=True
            )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        if self._collector is not None:
            self._collector.start()

    def submit(self, work: Callable[[], Any], on_done: Callable[[Any], None]) -> None:
        """Queue `work` for the thread and its result for `on_done` on the loop."""
        self._queue.put((work, on_done))

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` between steps and wait for it; its exception is the caller's."""
        future: asyncio.Future[T] = self._loop.create_future()

        def guarded() -> Callable[[], None]:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - the awaiting caller gets it, whatever it is
                failure = error
                return lambda: None if future.done() else future.set_exception(failure)
            return lambda: None if future.done() else future.set_result(result)

        self.submit(guarded, lambda settle: settle())
        return await future

    async def stop(self) -> None:
        """Let the work in the queue finish, then end the thread."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._launched is not None and self._collector is not None:
            self._launched.put(None)
            await asyncio.to_thread(self._collector.join)

    def _run(self) -> None:
        try:
            self._prepare()
            while (work := self._queue.get()) is not None:
                function, on_done = work
                result = function()
                if self._launched is not None:
                    self._launched.put((result, on_done))
                else:
                    self._tell(on_done, result)
        except BaseException as error:  # noqa: BLE001 - nothing may be lost here: the engine fails with it
            self._tell(self._on_failure, error)

    def _collect(self) -> None:
        assert self._launched is not None
        try:
            while (launched := self._launched.get()) is not None:
                result, on_done = launched
                self._tell(on_done, result.wait() if isinstance(result, Pending) else result)
        except BaseException as error:  # noqa: BLE001 - as above
            self._tell(self._on_failure, error)

    def _tell(self, callback: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, value)
