"""Runs requests and waits for what comes of them: on a thread, or in a coroutine.

However a wait ends (an interrupt, a cancellation, an iterator that is left), what was not answered
yet is given up. No wait is blind: every half second somebody looks whether the engine is still there.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Final

from finback.shared.offline.host import EngineHost
from finback.shared.offline.job import Job
from finback.shared.offline.outputs import Completion, CompletionChunk
from finback.shared.offline.progress import Progress
from finback.shared.offline.track import Request

_TICK_S: Final = 0.5


class Consumer:
    """`max_unread`: answers that a stream may have begun and nobody has read to their end."""

    def __init__(self, host: EngineHost, *, max_unread: int) -> None:
        self._host = host
        self._max_unread = max_unread

    def answers(self, requests: Sequence[Request], *, progress: bool) -> list[Completion]:
        """All answers, in the order of the requests."""
        is_over = threading.Event()
        job = Job(requests, wake=is_over.set)
        shown = Progress(job) if progress else None
        try:
            self._host.submit(job)
            while not job.is_over:
                is_over.wait(_TICK_S)
                self._check(job)
                if shown is not None:
                    shown.show()
        finally:
            self._host.abort(job)
            if shown is not None:
                shown.close()
        return job.completions()

    def chunks(self, requests: Sequence[Request]) -> Iterator[CompletionChunk]:
        """The answers as they come."""
        news = threading.Event()
        job = Job(requests, wake=news.set, max_unread=self._max_unread)
        try:
            self._host.submit(job)
            while not job.is_read:
                news.wait(_TICK_S)
                news.clear()
                yield from self._taken(job)
        finally:
            self._host.abort(job)

    async def answers_async(self, requests: Sequence[Request]) -> list[Completion]:
        """`answers` for a coroutine."""
        waker = _LoopWaker()
        job = Job(requests, wake=waker.wake)
        try:
            self._host.submit(job)
            while not job.is_over:
                await waker.wait()
                self._check(job)
        finally:
            self._host.abort(job)
        return job.completions()

    async def chunks_async(
        self, requests: Sequence[Request]
    ) -> AsyncGenerator[CompletionChunk, None]:
        """`chunks` for a coroutine."""
        waker = _LoopWaker()
        job = Job(requests, wake=waker.wake, max_unread=self._max_unread)
        try:
            self._host.submit(job)
            while not job.is_read:
                await waker.wait()
                for chunk in self._taken(job):
                    yield chunk
        finally:
            self._host.abort(job)

    def _taken(self, job: Job) -> Iterator[CompletionChunk]:
        self._check(job)
        job.raise_failure()
        yield from job.take()
        if job.pending:
            self._host.feed()

    def _check(self, job: Job) -> None:
        """Do not wait for a job that nobody works on."""
        if not job.is_over:
            self._host.check_alive()


class _LoopWaker:
    """Wakes a coroutine of the running loop from another thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        """From any thread; nobody is woken any more when the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Until woken since the last time, or for a moment."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), _TICK_S)
        self._event.clear()
