"""Runs an engine on a loop thread and feeds it the prompts of all calls.

A call may bring any number of prompts: as many are in the engine at once as it can run, and as many
again that wait there; the others wait here. Calls take turns.
"""

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import SequenceOutput, StepOutput
from finback.shared.engine.sequence import SequenceKey, SequenceSpec
from finback.shared.errors import InvariantViolated, ServingError, Unavailable
from finback.shared.offline.counts import Counts
from finback.shared.offline.job import Job
from finback.shared.offline.loop_thread import LoopThread
from finback.shared.offline.outputs import LLMStats
from finback.shared.offline.track import Track

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
    """One engine. `submit`, `abort`, `feed`, `stats`, ... may be called from any thread."""

    def __init__(self, load: LoadEngine, tokenizer: Tokenizer, *, window: int) -> None:
        """Load and start. `window`: sequences that are in the engine at once."""
        self._tokenizer = tokenizer
        self._window = window
        self._jobs: deque[Job] = deque()  # those that may have prompts waiting
        self._open: dict[SequenceKey, tuple[Job, Track]] = {}
        self._num_started = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._closing = threading.Lock()
        self._counts = Counts()
        self._last_stats: LLMStats | None = None
        self._engine = load(self._on_step, self._on_failure)
        self.max_model_len = self._engine.max_model_len
        self.cache_spec = self._engine.cache_spec
        self._thread = LoopThread("finback-engine")
        try:
            self._thread.run(self._engine.start, _START_S)
        except BaseException:
            self.close()
            raise
        _OPEN.add(self)

    # -- from any thread

    def submit(self, job: Job) -> None:
        """Run a job. Raises `Unavailable` when closed, or what the engine failed with."""
        self.check_alive()
        self._thread.post(self._submit, job)

    def abort(self, job: Job) -> None:
        """End a job and its sequences; nothing happens to one that is over."""
        if not job.is_over and self._thread.is_alive:
            self._thread.post(self._abort, job)

    def feed(self) -> None:
        """A consumer has made room in its job."""
        self._thread.post(self._feed)

    def check_alive(self) -> None:
        """Raise if nobody works on jobs any more."""
        if self._is_closed:
            raise Unavailable("this LLM is closed")
        self._thread.check()
        if self._failure is not None:
            raise self._failed()

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

    async def _stats(self) -> LLMStats:
        return self._counts.stats(self._engine)

    async def _reset_prefix_cache(self) -> None:
        self._engine.reset_prefix_cache()

    async def _shut(self) -> None:
        for job in {job for job, _ in self._open.values()}.union(self._jobs):
            job.fail(Unavailable("this LLM was closed"))
        self._open.clear()
        self._jobs.clear()
        try:
            self._last_stats = self._counts.stats(self._engine)
            await self._engine.stop()
        finally:
            del self._engine  # with its memory
            self._thread.end()

    def _submit(self, job: Job) -> None:
        if self._is_closed:
            job.fail(Unavailable("this LLM was closed"))
        elif self._failure is not None:
            job.fail(self._failed())
        else:
            self._jobs.append(job)
            self._feed()

    def _abort(self, job: Job) -> None:
        job.fail(Unavailable("the call was given up"))
        for key in [key for key, (owner, _) in self._open.items() if owner is job]:
            del self._open[key]
            self._engine.abort(key)
        self._feed()

    def _feed(self) -> None:
        """Let prompts in, one a job in turn, while there is room."""
        num_idle = 0
        while len(self._open) < self._window and num_idle < len(self._jobs):
            job = self._jobs.popleft()
            if not job.pending:
                continue
            self._jobs.append(job)
            num_idle += 1
            if job.may_start():
                num_idle = 0
                self._enter(job)

    def _enter(self, job: Job) -> None:
        request = job.start()
        self._num_started += 1
        key = (f"offline-{self._num_started}", 0)
        spec = SequenceSpec(
            key=key,
            attempt=1,
            token_ids=np.array(request.token_ids, dtype=np.int32),
            sampling=request.sampling,
            seed=request.seed,
        )
        self._open[key] = (job, Track(request, self._tokenizer, is_streamed=job.is_streamed))
        admission = self._engine.add(spec)
        if not admission.accepted:
            del self._open[key]
            job.fail(InvariantViolated(f"prompts[{request.index}]: {admission.message}"))

    # -- what the engine tells

    def _on_step(self, output: StepOutput) -> None:
        self._counts.busy_ms += output.duration_ms
        num_open = len(self._open)
        for row in output.rows:
            if row.key in self._open:
                self._take(row)
        if len(self._open) < num_open:
            self._feed()

    def _take(self, row: SequenceOutput) -> None:
        job, track = self._open[row.key]
        if row.end is not None and row.end.finish_reason == "error":
            del self._open[row.key]
            job.fail(InvariantViolated(f"prompts[{track.request.index}]: {row.end.error_message}"))
            self._abort(job)
            return
        chunk = track.push(row)
        if track.is_over:
            del self._open[row.key]
            if row.end is None:
                self._finish(track, row.key)
            self._engine.forget(row.key)
            self._counts.add(track)
        job.tell(chunk)
        if track.is_over:
            job.end(track)

    def _finish(self, track: Track, key: SequenceKey) -> None:
        """A stop string ended it: the engine does not know yet."""
        counts = self._engine.finish(key, track.num_tokens)
        if counts is not None:
            track.count(counts)

    def _on_failure(self, error: BaseException) -> None:
        self._failure = error
        for job in {job for job, _ in self._open.values()}.union(self._jobs):
            job.fail(self._failed())
        self._open.clear()
        self._jobs.clear()

    def _failed(self) -> ServingError:
        error = InvariantViolated(f"the engine failed: {self._failure!r:.200}")
        error.__cause__ = self._failure
        return error
