"""The prompts of all calls and their way through the engine. Lives on the engine's thread.

A call may bring any number of prompts: as many are in the engine at once as it can run, and as many
again that wait there; the others wait here. Calls take turns.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.engine.engine import Engine
from finback.shared.engine.output import SequenceOutput, StepOutput
from finback.shared.engine.sequence import SequenceKey, SequenceSpec
from finback.shared.errors import InvariantViolated, ServingError, Unavailable
from finback.shared.offline.counts import Counts
from finback.shared.offline.drafter import LocalDrafter
from finback.shared.offline.job import Job
from finback.shared.offline.outputs import LLMStats
from finback.shared.offline.track import Track


class Calls:
    """`engine` is set once it is there; it tells `on_step`. `window`: sequences in it at once."""

    def __init__(
        self, tokenizer: Tokenizer, *, window: int, drafter: LocalDrafter | None = None
    ) -> None:
        self.engine: Engine
        self._tokenizer = tokenizer
        self._window = window
        self._drafter = drafter
        self._jobs: deque[Job] = deque()  # those that may have prompts waiting
        self._open: dict[SequenceKey, tuple[Job, Track]] = {}
        self._num_started = 0
        self._counts = Counts()
        self._make_refusal: Callable[[], ServingError] | None = None

    def submit(self, job: Job) -> None:
        """Take a job, or fail it as `end` was told."""
        if self._make_refusal is not None:
            job.fail(self._make_refusal())
            return
        self._jobs.append(job)
        self.feed()

    def abort(self, job: Job) -> None:
        """End a job and its sequences."""
        job.fail(Unavailable("the call was given up"))
        for key in [key for key, (owner, _) in self._open.items() if owner is job]:
            self._leave(key)
            self.engine.abort(key)
        self.feed()

    def end(self, make_error: Callable[[], ServingError]) -> None:
        """Fail all jobs, those to come too, each with an error of its own."""
        self._make_refusal = make_error
        for job in {job for job, _ in self._open.values()}.union(self._jobs):
            job.fail(make_error())
        self._open.clear()
        self._jobs.clear()

    def stats(self) -> LLMStats:
        """What was done so far."""
        return self._counts.stats(self.engine)

    def feed(self) -> None:
        """Let prompts into the engine, one a job in turn, while there is room."""
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
        token_ids = np.array(request.token_ids, dtype=np.int32)
        spec = SequenceSpec(
            key=key,
            attempt=1,
            token_ids=token_ids,
            sampling=request.sampling,
            seed=request.seed,
            drafting=self._drafter is not None,
        )
        self._open[key] = (job, Track(request, self._tokenizer, is_streamed=job.is_streamed))
        if self._drafter is not None:
            self._drafter.add(key, token_ids)
        admission = self.engine.add(spec)
        if not admission.accepted:
            self._leave(key)
            job.fail(InvariantViolated(f"prompts[{request.index}]: {admission.message}"))

    def _leave(self, key: SequenceKey) -> None:
        del self._open[key]
        if self._drafter is not None:
            self._drafter.end(key)

    # -- what the engine tells

    def on_step(self, output: StepOutput) -> None:
        """Take the tokens of a step."""
        self._counts.busy_ms += output.duration_ms
        num_open = len(self._open)
        for row in output.rows:
            if row.key in self._open:
                self._take(row)
        if self._drafter is not None and output.want_drafts:
            self._draft(output)
        if len(self._open) < num_open:
            self.feed()

    def _take(self, row: SequenceOutput) -> None:
        job, track = self._open[row.key]
        if row.end is not None and row.end.finish_reason == "error":
            job.fail(InvariantViolated(f"prompts[{track.request.index}]: {row.end.error_message}"))
            self.abort(job)
            return
        chunk = track.push(row)
        if self._drafter is not None:
            self._drafter.step(row)
        if track.is_over:
            self._leave(row.key)
            if row.end is None:
                self._finish(track, row.key)
            self.engine.forget(row.key)
            self._counts.add(track)
        job.tell(chunk)
        if track.is_over:
            job.end(track)

    def _finish(self, track: Track, key: SequenceKey) -> None:
        """A stop string ended it: the engine does not know yet."""
        counts = self.engine.finish(key, track.num_tokens)
        if counts is not None:
            track.count(counts)

    def _draft(self, output: StepOutput) -> None:
        if self._drafter is None:
            return
        keys = [key for key, _ in output.want_drafts if key in self._open]
        times = self.engine.step_times
        for key, position, token_ids in self._drafter.drafts(keys, len(output.rows), times):
            self.engine.provide_draft(key, position, token_ids)
