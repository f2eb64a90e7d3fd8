"""An event loop on a thread of its own, for callers that have none.

The thread is a daemon: it never keeps the interpreter from ending. A child made by `fork` has no
such thread, so that every use there is refused instead of waiting for ever.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

import uvloop

from finback.shared.errors import Unavailable

T = TypeVar("T")
P = ParamSpec("P")

_FORKED: Final = (
    "this LLM was made before a fork and does not work in the child; make it there, "
    "or start processes with multiprocessing's 'spawn'"
)


class _DaemonExecutor(ThreadPoolExecutor):
    """A daemon thread for each call, since a pool takes none while the interpreter exits.

    The loop wants a pool by type; few calls go there (waits for the device thread's end).
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """See `Executor`."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                future.set_exception(error)

        threading.Thread(target=run, name="finback-wait", daemon=True).start()
        return future


class LoopThread:
    """Runs callbacks and coroutines until `stop`. Methods may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._loop.set_default_executor(_DaemonExecutor(max_workers=1))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Does it still run, in this process?"""
        return self._is_mine and self._thread.is_alive()

    @property
    def _is_mine(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `Unavailable` if nothing runs here any more."""
        if not self._is_mine:
            raise Unavailable(_FORKED)
        if not self._thread.is_alive():
            raise Unavailable("this LLM is closed")

    def post(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback` on the loop, after what was posted before; dropped when it has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)

    def run(self, start: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Run a coroutine there and wait for its result; it is cancelled when that takes longer."""
        done: Future[T] = Future()

        def begin() -> None:
            task = self._loop.create_task(start())
            done.add_done_callback(lambda _: self.post(task.cancel))
            task.add_done_callback(lambda _: _settle(done, task))

        self.check()
        self.post(begin)
        try:
            return done.result(timeout_s)
        except CancelledError:
            raise Unavailable("this LLM is closed") from None
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            done.cancel()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin a coroutine there and do not wait."""
        self.post(self._begin, work)

    def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._task = self._loop.create_task(work())  # kept: the loop holds it weakly

    def end(self) -> None:
        """End the loop; call it there."""
        self._loop.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; True if it has, or never ran in this process."""
        if not self._is_mine or threading.current_thread() is self._thread:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()


def _settle(done: "Future[T]", task: "asyncio.Task[T]") -> None:
    if done.done():
        return  # nobody waits any more
    if task.cancelled():
        done.cancel()
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())
