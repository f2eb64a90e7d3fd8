"""The prefill role: takes prompts from gateways, computes them, hands them to decode."""

from typing import ClassVar, Final

import anyio

from finback.services.prefill.hand_over import HandOver
from finback.services.prefill.job import Job
from finback.shared.actor.endpoint import Call
from finback.shared.actor.fence import Fence
from finback.shared.clock import monotonic_s
from finback.shared.engine.from_wire import known_tokens
from finback.shared.engine.output import StepOutput
from finback.shared.engine.role import FullSequences
from finback.shared.engine.step_clock import StepClock
from finback.shared.engine.token_chunks import ChunkAssembler
from finback.shared.engine.worker_host import WorkerHost
from finback.shared.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServingError,
    Unavailable,
)
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.prefill import (
    Ack,
    CancelReply,
    CancelRequest,
    PrefillAccepted,
    PrefillFailed,
    PrefillRequest,
    TokenChunk,
)

_CHUNKS_TIMEOUT_S: Final = 10.0
_FAILED_TIMEOUT_S: Final = 2.0
_FAILED_TRIES: Final = 3
_DRAIN_POLL_S: Final = 0.02


class PrefillRole:
    """See the module. A prompt is a `Job` with a task of its own until decode has it."""

    name: ClassVar[str] = "prefill"

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._jobs: dict[str, Job] = {}
        self._chunks = ChunkAssembler()
        self._fence = Fence()
        self._hand_over = HandOver(host)
        self._is_draining = False
        self._clock = StepClock()

    # -- lifecycle

    async def start(self) -> None:
        """Add the endpoints."""
        serve = self._host.serve
        await serve(self.name, "chunk", TokenChunk, self._chunk)
        await serve(self.name, "cancel", CancelRequest, self._cancel, workers=32)
        await serve(
            self.name, "generate", PrefillRequest, self._generate, workers=32, takes_work=True
        )

    def on_step(self, output: StepOutput) -> None:
        """Note how far prompts have come."""
        for chunk in output.chunks:
            job = self._job(chunk.key[0], chunk.attempt)
            if job is not None:
                self._clock.record_chunk(output, chunk, job.parent)
        for progress in output.prefilled:
            job = self._job(progress.key[0], progress.attempt)
            if job is not None:
                job.advance(progress.num_computed_tokens)

    def _job(self, request_id: str, attempt: int) -> Job | None:
        job = self._jobs.get(request_id)
        return job if job is not None and job.spec.attempt == attempt else None

    async def drain(self) -> None:
        """Take nothing new; return when all prompts are handed over."""
        self._is_draining = True
        while self._jobs:  # noqa: ASYNC110  # jobs come and go, no single event
            await anyio.sleep(_DRAIN_POLL_S)

    async def stop(self) -> None:
        """Give up what is left, and say so to its gateways."""
        self._is_draining = True
        for job in list(self._jobs.values()):
            await self._end(job)
            await self._tell_failed(job, Unavailable("the prefill instance stops"))

    @property
    def num_open(self) -> int:
        """Prompts in hand."""
        return len(self._jobs)

    @property
    def num_queued(self) -> int:
        """Prompts that wait for room at decode."""
        return sum(not job.is_in_engine for job in self._jobs.values())

    # -- endpoints

    async def _generate(self, call: Call[PrefillRequest]) -> PrefillAccepted:
        message, spec = call.message, call.message.spec
        if self._is_draining:
            raise Unavailable("the prefill instance is draining", reason="draining")
        if not spec.choices:
            raise InvalidRequest("a generation has at least one choice", param="n")
        if not self._fence.admit(spec.request_id, spec.attempt):
            raise Cancelled("this attempt was cancelled or superseded", reason="fenced")
        accepted = PrefillAccepted(instance=self._host.instance, epoch=self._host.epoch)
        known = self._jobs.get(spec.request_id)
        if known is not None and known.spec.attempt == spec.attempt:
            return accepted
        if known is not None:
            await self._end(known)
        if len(self._jobs) >= self._host.config.max_queue:
            raise Overloaded("too many prompts wait", reason="queue_full", retry_after_s=1.0)
        timeout_s = spec.timeout_ms / 1000 or self._host.config.request_timeout_s
        job = Job(request=message, deadline_s=monotonic_s() + timeout_s, parent=tracing.current())
        is_short = message.num_chunks == 1
        if is_short and self._is_co_hosted(job) and not self._may_fetch(job, spec.token_ids):
            await self._add_full(job, spec.token_ids)
            return accepted
        self._jobs[spec.request_id] = job
        self._host.spawn(self._run, job)
        return accepted

    async def _chunk(self, call: Call[TokenChunk]) -> Ack:
        self._chunks.add(call.message)
        return Ack()

    async def _cancel(self, call: Call[CancelRequest]) -> CancelReply:
        message = call.message
        if message.choice is None:
            self._fence.admit(message.request_id, message.attempt + 1)
        job = self._jobs.get(message.request_id)
        found = False
        is_whole = message.choice is None or (job is not None and len(job.spec.choices) == 1)
        if job is not None and job.spec.attempt <= message.attempt and is_whole:
            await self._end(job)
            found = True
        sibling = self._host.sibling("decode")
        if isinstance(sibling, FullSequences):
            found |= await sibling.cancel(message.request_id, message.attempt, message.choice)
        return CancelReply(found=found)

    # -- one prompt

    def _is_co_hosted(self, job: Job) -> bool:
        is_ours = job.request.decode_instance == self._host.instance
        if is_ours and self._host.sibling("decode") is None:
            raise InvalidRequest("this instance has no decode role", param="decode_instance")
        return is_ours

    def _may_fetch(self, job: Job, prompt: bytes) -> bool:
        """Would decode wait for the cache? Then the gateway does not."""
        tokens = known_tokens(job.spec.choices[0], prompt)
        return self._host.prefixes.may_help(tokens, job.spec.cache_salt.encode())

    async def _add_full(self, job: Job, prompt: bytes) -> None:
        sibling = self._host.sibling("decode")
        if isinstance(sibling, FullSequences):
            await sibling.add_full(job.spec, prompt, job.remaining_s())

    async def _run(self, job: Job) -> None:
        """The whole way of a job, in the service's task group."""
        failure: ServingError | None = None
        try:
            with job.scope, anyio.fail_after(job.remaining_s()):
                await self._work(job)
        except TimeoutError:
            failure = DeadlineExceeded("the prompt was not computed in time")
        except ServingError as error:
            failure = error
        finally:
            with anyio.CancelScope(shield=True):
                await self._leave(job)
        if failure is not None:
            await self._tell_failed(job, failure)

    async def _work(self, job: Job) -> None:
        message = job.request
        with anyio.move_on_after(_CHUNKS_TIMEOUT_S):
            job.prompt = await self._chunks.join(
                job.spec.request_id, job.spec.attempt, job.spec.token_ids, message.num_chunks
            )
        if not job.prompt:
            raise InvalidRequest("the prompt is empty or did not arrive", param="messages")
        if self._is_co_hosted(job):
            await self._add_full(job, job.prompt)
        else:
            await self._hand_over.run(job)

    async def _leave(self, job: Job) -> None:
        if job.is_in_engine:
            self._host.engine.release(job.key)
            await self._host.engine.abort_and_wait(job.key)
        if self._jobs.get(job.spec.request_id) is job:
            del self._jobs[job.spec.request_id]
        job.done.set()

    async def _end(self, job: Job) -> None:
        job.scope.cancel()
        await job.done.wait()

    # -- failures

    async def _tell_failed(self, job: Job, error: ServingError) -> None:
        """Free what decode reserved, and tell the gateway, which decides what to do next."""
        self._host.metrics.count("finback.prefill.failures", code=error.code)
        spec, subjects = job.spec, self._host.subjects
        await self._say(
            subjects.instance("decode", job.request.decode_instance, "cancel"),
            CancelRequest(request_id=spec.request_id, attempt=spec.attempt, reason=error.code),
            CancelReply,
            job,
        )
        failed = PrefillFailed(
            request_id=spec.request_id,
            attempt=spec.attempt,
            instance=job.blamed or self._host.instance,
            code=error.code,
            public_message=error.public_message,
            reason=error.reason or "",
        )
        subject = subjects.instance("gateway", spec.gateway, "failed")
        for _ in range(_FAILED_TRIES):
            if await self._say(subject, failed, Ack, job):
                return

    async def _say(
        self, subject: str, message: CancelRequest | PrefillFailed, reply_type: type, job: Job
    ) -> bool:
        try:
            await self._host.client.call(
                subject,
                message,
                reply_type,
                timeout_s=_FAILED_TIMEOUT_S,
                request_id=job.spec.request_id,
                attempt=job.spec.attempt,
            )
        except ServingError as error:
            self._host.log.warning(
                "not told", subject=subject, error=error.public_message, code=error.code
            )
            return False
        return True
