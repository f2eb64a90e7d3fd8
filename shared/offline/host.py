"""An engine on a loop thread, from its start to its stop."""

import atexit
import weakref
from collections.abc import Callable
from typing import Final

from finback.shared.engine.engine import Engine
from finback.shared.engine.output import StepOutput
from finback.shared.errors import InvariantViolated, ServingError, Unavailable
from finback.shared.offline.calls import Calls
from finback.shared.offline.job import Job
from finback.shared.offline.loop_thread import LoopThread
from finback.shared.offline.outputs import LLMStats

# Loads an engine, not started, that tells `on_step` and `on_failure`.
LoadEngine = Callable[[Callable[[StepOutput], None], Callable[[BaseException], None]], Engine]

# A first start may compile kernels.
_START_S: Final = 900.0
# A running step is waited for; the longest are those of long prompts on few cores.
_STOP_S: Final = 60.0
_CALL_S: Final = 60.0

_OPEN: "weakref.WeakSet[EngineHost]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Device threads must not run into the interpreter's end."""
    for host in list(_OPEN):
        host.close()


class EngineHost:
    """One engine and the calls it works on. Methods may be called from any thread."""

    def __init__(self, load: LoadEngine, calls: Calls) -> None:
        """Load (on this thread) and start."""
        self._calls = calls
        self._failure: BaseException | None = None
        self._is_closed = False
        self._last_stats: LLMStats | None = None
        calls.engine = load(calls.on_step, self._on_failure)
        self.max_model_len = calls.engine.max_model_len
        self.cache_spec = calls.engine.cache_spec
        self._thread = LoopThread("finback-engine")
        try:
            self._thread.run(self._start, _START_S)
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    def submit(self, job: Job) -> None:
        """Run a job. Raises `Unavailable` when closed, or what the engine failed with."""
        self.check_alive()
        self._thread.post(self._calls.submit, job)

    def abort(self, job: Job) -> None:
        """End a job and its sequences; nothing happens to one that is over."""
        if not job.is_over and self._thread.is_alive:
            self._thread.post(self._abort, job)

    def feed(self) -> None:
        """A consumer has made room in its job."""
        self._thread.post(self._calls.feed)

    def check_alive(self) -> None:
        """Raise if nobody works on jobs any more."""
        if self._is_closed:
            raise Unavailable("this LLM is closed")
        self._thread.check()
        if self._failure is not None:
            raise _failed(self._failure)

    def stats(self) -> LLMStats:
        """Counts until now; when closed, until then."""
        if self._last_stats is not None:
            return self._last_stats
        return self._thread.run(self._stats, _CALL_S)

    def reset_prefix_cache(self) -> None:
        """Make the engine forget all prefixes."""
        self.check_alive()
        self._thread.run(self._reset_prefix_cache, _CALL_S)

    def ask_to_stop(self) -> None:
        """Stop soon; for the garbage collector, which must not wait."""
        if not self._is_closed and self._thread.is_alive:
            self._is_closed = True
            self._thread.start(self._shut)

    def close(self) -> None:
        """Stop the engine and wait for it. Nothing happens twice, or in a child of fork."""
        self.ask_to_stop()
        if not self._thread.join(_STOP_S):
            raise Unavailable(f"the engine did not stop within {_STOP_S:g} s")
        _OPEN.discard(self)

    # -- on the engine's thread

    async def _start(self) -> None:
        try:
            await self._calls.engine.start()
        except InvariantViolated:
            if self._failure is not None:
                raise _failed(self._failure) from self._failure
            raise

    async def _stats(self) -> LLMStats:
        return self._calls.stats()

    async def _reset_prefix_cache(self) -> None:
        self._calls.engine.reset_prefix_cache()

    def _abort(self, job: Job) -> None:
        if not job.is_over and not self._is_closed and self._failure is None:
            self._calls.abort(job)

    async def _shut(self) -> None:
        self._calls.end(lambda: Unavailable("this LLM was closed"))
        try:
            self._last_stats = self._calls.stats()
            await self._calls.engine.stop()
        finally:
            del self._calls.engine  # with its memory
            self._thread.end()

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        self._calls.end(lambda: _failed(error))


def _failed(cause: BaseException) -> ServingError:
    error = InvariantViolated(f"the engine failed: {cause!r:.200}")
    error.__cause__ = cause
    return error
