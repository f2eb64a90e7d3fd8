"""The workers of one bench: started, armed, set off together, stopped, and their results joined."""

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import IO, Any, Final, Self

from finback.shared.bench.load import Job, Pace, Sampling
from finback.shared.bench.outcomes import Outcome
from finback.shared.errors import ServingError, Unavailable

# Loading a model for the first time may compile kernels.
OPEN_TIMEOUT_S: Final = 900.0
# A worker tells its progress twice a second.
SILENCE_S: Final = 120.0
CLOSE_TIMEOUT_S: Final = 20.0
# Long enough for every worker to have its `go` before the time in it.
LEAD_S: Final = 0.05
_LINE_BYTES: Final = 2**30

Line = dict[str, Any]
OnProgress = Callable[[int, int], None]


class BenchFailed(ServingError):
    """The bench cannot go on; the message says why."""


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of one run, from all workers."""

    elapsed_s: float = 0.0
    is_cut: bool = False
    outcomes: list[Outcome] = field(default_factory=list)
    token_counts: Counter[str] = field(default_factory=Counter)
    surprisals_bits: list[float] = field(default_factory=list)
    client_cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    stats: Line = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """One worker's `done`."""
        self.elapsed_s = max(self.elapsed_s, line["ended_s"])
        self.is_cut |= line["is_cut"]
        self.outcomes += map(Outcome.from_json, line["outcomes"])
        self.token_counts.update(line["token_counts"])
        self.surprisals_bits += line["surprisals_bits"]
        self.client_cpu_s += line["cpu_s"]
        self.peak_rss_bytes = max(self.peak_rss_bytes, line["peak_rss_bytes"])
        self.stats = line["stats"]


class Crew:
    """Use it as an async context manager; `about` is what the first worker said of itself."""

    def __init__(self, opening: Line, num_workers: int) -> None:
        self.about: Line = {}
        self._opening = opening
        self._workers = [_Worker() for _ in range(num_workers)]
        self._is_stopping = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def stop(self) -> None:
        """Cut the run short that goes on, or that begins next."""
        self._is_stopping.set()

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(worker.start() for worker in self._workers))
            told = await self._all("ready", self._opening, OPEN_TIMEOUT_S)
        except BaseException:
            await self._close()
            raise
        self.about = told[0]["about"]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._close()

    async def reset(self) -> None:
        """Forget cached prefixes, as far as the client can."""
        await self._all("reset", {"kind": "reset"}, SILENCE_S)

    async def run(
        self, jobs: Sequence[Job], sampling: Sampling, pace: Pace, on_progress: OnProgress
    ) -> Run:
        """Send all jobs; a stop makes it end early, with what came (`is_cut`)."""
        total = len(self._workers) if not pace.concurrency else pace.concurrency
        workers = self._workers[: min(len(self._workers), total, len(jobs))]
        for at, worker in enumerate(workers):
            share = pace.concurrency // len(workers) + (at < pace.concurrency % len(workers))
            await worker.say(
                {
                    "kind": "arm",
                    "jobs": [asdict(job) for job in jobs[at :: len(workers)]],
                    "sampling": asdict(sampling),
                    "pace": {**asdict(pace), "concurrency": share},
                }
            )
        await asyncio.gather(*(worker.hear("armed", SILENCE_S) for worker in workers))
        start_at_s = time.monotonic() + LEAD_S
        for worker in workers:
            worker.progress = (0, 0)
            await worker.say({"kind": "go", "start_at_s": start_at_s})

        def tell() -> None:
            done, tokens = zip(*(worker.progress for worker in workers), strict=True)
            on_progress(sum(done), sum(tokens))

        stopping = asyncio.create_task(self._pass_on_stop(workers))
        try:
            lines = await asyncio.gather(
                *(worker.hear("done", SILENCE_S, tell) for worker in workers)
            )
        finally:
            stopping.cancel()
        run = Run()
        for line in lines:
            run.add(line)
        run.outcomes.sort(key=lambda outcome: outcome.index)
        return run

    async def _pass_on_stop(self, workers: Sequence["_Worker"]) -> None:
        await self._is_stopping.wait()
        for worker in workers:
            await worker.say({"kind": "stop"})

    async def _all(self, answer: str, line: Line, timeout_s: float) -> list[Line]:
        for worker in self._workers:
            await worker.say(line)
        return await asyncio.gather(*(worker.hear(answer, timeout_s) for worker in self._workers))

    async def _close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _Worker:
    """One process. It has a session of its own, so that Ctrl-C reaches the bench alone."""

    def __init__(self) -> None:
        self.progress = (0, 0)
        self._process: asyncio.subprocess.Process | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "finback.shared.bench.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            limit=_LINE_BYTES,
        )

    async def say(self, line: Line) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise Unavailable("a bench worker was not started")
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise BenchFailed(self._last_words()) from None

    async def hear(
        self, wanted: str, timeout_s: float, tell: Callable[[], None] | None = None
    ) -> Line:
        """The next line of that kind. Raises `BenchFailed` with what went wrong instead."""
        process = self._process
        if process is None or process.stdout is None:
            raise Unavailable("a bench worker was not started")
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    text = await process.stdout.readline()
            except TimeoutError:
                message = f"a bench worker has said nothing for {timeout_s:g} s"
                raise BenchFailed(message) from None
            if not text:
                raise BenchFailed(self._last_words())
            line: Line = json.loads(text)
            if line["kind"] == "failed":
                raise BenchFailed(line["message"])
            if line["kind"] == "progress":
                self.progress = (line["num_done"], line["num_tokens"])
                if tell is not None:
                    tell()
            elif line["kind"] == wanted:
                return line

    async def close(self) -> None:
        """Its input ends; what does not end then is killed."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"a bench worker ended: {lines[-1] if lines else 'it said nothing'}"
