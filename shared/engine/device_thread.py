"""The one thread that computes. Work is done in the order it was given; idle means asleep.

Results come back as callbacks on the event loop, in the same order, so that whoever waits for an
item knows that everything before it has been told as well.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_Work = tuple[Callable[[], Any], Callable[[Any], None]]


class DeviceThread:
    """Runs work off the event loop; `on_failure` (on the loop) hears of the exception that ended it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        prepare: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._loop = loop
        self._prepare = prepare
        self._on_failure = on_failure
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="finback-device", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, work: Callable[[], T], on_done: Callable[[T], None]) -> None:
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

    def _run(self) -> None:
        try:
            self._prepare()
            while (work := self._queue.get()) is not None:
                function, on_done = work
                self._tell(on_done, function())
        except BaseException as error:  # noqa: BLE001 - nothing may be lost here: the engine fails with it
            self._tell(self._on_failure, error)

    def _tell(self, callback: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(callback, value)
