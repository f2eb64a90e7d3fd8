"""Sends a list of requests when they are due, so many at once, and keeps what comes of each."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

from finback.shared.bench.track import RequestFailed, RequestRefused, Track

# A service that refuses without advice is asked again after about this long.
RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request as a worker gets it. `due_s`: after the start."""

    index: int
    prompt: tuple[int, ...]
    num_tokens: int
    seed: int
    due_s: float

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Job":
        return cls(**{**raw, "prompt": tuple(raw["prompt"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How all requests of a run are sampled. `num_logprobs` None: without."""

    temperature: float
    num_logprobs: int | None = None


class Client(Protocol):
    """A way to the service under test."""

    async def ask(self, job: Job, sampling: Sampling, track: Track) -> None:
        """Send one request and feed `track` until its answer is over.

        Raises `RequestRefused` or `RequestFailed`.
        """

    async def reset(self) -> None:
        """Forget cached prefixes, where a client can ask for that."""

    def stats(self) -> dict[str, Any]:
        """What the client knows of the service's memory and steps since it began."""

    async def close(self) -> None: ...


@runtime_checkable
class BatchClient(Client, Protocol):
    """A client that can be given all requests in one call."""

    async def ask_all(
        self, jobs: Sequence[Job], sampling: Sampling, tracks: Sequence[Track]
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`concurrency` 0: no bound. `is_open`: requests have due times of their own (an open loop);
    a refused one is then not asked again. `timeout_s`: the longest life of a request."""

    concurrency: int
    is_open: bool
    timeout_s: float


class Load:
    """One run over the jobs; `tracks` may be looked at while it goes on."""

    def __init__(self, client: Client, jobs: Sequence[Job], sampling: Sampling, pace: Pace) -> None:
        self.tracks: list[Track] = []
        self._client = client
        self._jobs = sorted(jobs, key=lambda job: job.due_s)
        self._sampling = sampling
        self._pace = pace
        self._slots = asyncio.Semaphore(pace.concurrency or max(1, len(jobs)))
        self._jitter = random.Random(len(jobs))

    async def run(self, start_at_s: float) -> None:
        """Until every answer is over; cancelling it cuts the open ones off."""
        pace, client = self._pace, self._client
        if isinstance(client, BatchClient) and not pace.is_open and not pace.concurrency:
            await self._run_batch(client, start_at_s)
            return
        async with asyncio.TaskGroup() as group:
            for job in self._jobs:
                due_at_s = start_at_s + job.due_s
                if (wait_s := due_at_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                await self._slots.acquire()
                # With a bound and no times of their own, requests are due when a place is free.
                if self._pace.concurrency and not self._pace.is_open:
                    due_at_s = max(due_at_s, time.monotonic())
                track = Track(job.index, job.num_tokens, due_at_s)
                self.tracks.append(track)
                group.create_task(self._follow(job, track))

    async def _run_batch(self, client: BatchClient, start_at_s: float) -> None:
        self.tracks = [Track(job.index, job.num_tokens, start_at_s) for job in self._jobs]
        try:
            await client.ask_all(self._jobs, self._sampling, self.tracks)
        except RequestFailed as error:
            for track in self.tracks:
                if not track.is_ended:
                    track.error = str(error)

    async def _follow(self, job: Job, track: Track) -> None:
        try:
            async with asyncio.timeout(self._pace.timeout_s):
                await self._ask(job, track)
        except TimeoutError:
            track.error = f"no whole answer within {self._pace.timeout_s:g} s"
        except RequestFailed as error:
            track.error = str(error) or "the request failed"
        finally:
            self._slots.release()

    async def _ask(self, job: Job, track: Track) -> None:
        while True:
            track.sent(time.monotonic())
            try:
                await self._client.ask(job, self._sampling, track)
                return
            except RequestRefused as refused:
                track.num_refusals += 1
                if self._pace.is_open:
                    track.is_refused = True
                    raise
                wait_s = min(max(refused.retry_after_s, RETRY_S), MAX_RETRY_S)
                await asyncio.sleep(wait_s * self._jitter.uniform(0.8, 1.2))
