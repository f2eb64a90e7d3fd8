"""One bench from its first look at the machine to its last summary."""

import random
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from finback.shared.bench import environment, figures, repetition, workloads
from finback.shared.bench.crew import BenchFailed, Crew, Run
from finback.shared.bench.limits import Ceilings, ModelCost
from finback.shared.bench.load import Pace, Sampling
from finback.shared.bench.meter import Meter
from finback.shared.bench.options import BenchOptions
from finback.shared.bench.record import Line, Recorder, summary_line
from finback.shared.bench.target import Target, ceilings_of, cost_of, measure_ceilings
from finback.shared.bench.workloads import FIRST_ID, LAST_ID, NUM_MARKED, Request

PROBE_REQUESTS: Final = 8
PROBE_TOKENS: Final = 32
# Of the cores; more work than this beside the bench, and its figures are disturbed.
BUSY_SHARE: Final = 0.5
# What must be known of a vocabulary that nobody described: it holds all ids that are drawn.
UNKNOWN_VOCAB_SIZE: Final = LAST_ID + 1


class Observer(Protocol):
    """Whoever shows how the bench goes on."""

    def says(self, text: str) -> None: ...

    def warns(self, text: str) -> None: ...

    def begins(self, title: str, num_requests: int, num_tokens: int) -> None: ...

    def goes_on(self, num_done: int, num_tokens: int) -> None: ...

    def repetition(self, line: Line) -> None: ...

    def ends(self) -> None: ...


class Session:
    """Runs a bench; what it measured is in the recorder, whatever way it ends."""

    def __init__(
        self, options: BenchOptions, target: Target, recorder: Recorder, observer: Observer
    ) -> None:
        self.is_interrupted = False
        self._options = options
        self._target = target
        self._recorder = recorder
        self._observer = observer
        self._crew: Crew | None = None
        self._head: Line = {}
        self._cost: ModelCost | None = None
        self._ceilings: Ceilings | None = None
        self._probe: Line | None = None

    def interrupt(self) -> None:
        """End as soon as what was measured is kept."""
        self.is_interrupted = True
        if self._crew is not None:
            self._crew.stop()

    @property
    def is_measuring(self) -> bool:
        """Is there something that an interruption should keep?"""
        return self._crew is not None

    async def run(self) -> None:
        """Everything. Raises `BenchFailed` when a request failed or came back short."""
        about = environment.environment()
        ceilings = None
        if self._options.has_limit and self._is_local:
            ceilings = await self._look_at_machine()
        if about["load_average_1m"] > BUSY_SHARE * about["cores"]:
            self._observer.warns(
                f"this machine is busy (load {about['load_average_1m']:g} on {about['cores']} "
                "cores): figures and ceilings are those of what is left of it"
            )
        is_offline = self._options.mode == "offline"
        self._observer.says("loading the model" if is_offline else "starting the clients")
        async with Crew(self._target.opening, self._options.clients) as crew:
            self._crew = crew
            facts = {**self._target.facts, **crew.about}
            self._note(facts, ceilings, about)
            vocab_size = facts.get("model_config", {}).get("vocab_size", UNKNOWN_VOCAB_SIZE)
            for rate in self._options.rates_per_s or (None,):
                if not self.is_interrupted:
                    await self._run_rate(crew, vocab_size, rate)

    @property
    def _is_local(self) -> bool:
        return self._target.pids is not None

    async def _look_at_machine(self) -> Line | None:
        self._observer.says("measuring what this machine reaches at most")
        found = await measure_ceilings(self._target.device)
        if found is None:
            self._observer.warns("the machine's ceilings cannot be measured: no share of the limit")
        return found

    def _note(self, facts: Line, ceilings: Line | None, about: Line) -> None:
        """What all lines and the limit need."""
        about["versions"] |= facts.pop("versions", {})
        if ceilings is not None and facts.get("device") == "auto":
            facts["device"] = ceilings["device"]
        self._head = {"environment": about, "target": facts, "ceilings": ceilings}
        if ceilings is not None:
            self._ceilings = ceilings_of(ceilings)
        self._cost = cost_of(facts)

    async def _run_rate(self, crew: Crew, vocab_size: int, rate: float | None) -> None:
        """All repetitions of one workload at one rate, and their summary."""
        options = self._options
        requests = options.requests(vocab_size, rate)
        if not requests:
            raise BenchFailed("duration is too short: no request arrives within it")
        head = {
            "run_id": secrets.token_hex(6),
            "workload": repetition.described(options, requests, rate),
            **self._head,
        }
        if self._probe is None:
            self._probe = await self._look_at_sampling(crew, requests)
        kept: list[Line] = []
        try:
            for number in range(1 - options.warm_up, options.num_repetitions + 1):
                if self.is_interrupted:
                    break
                line = await self._repetition(crew, requests, number, head["run_id"], rate)
                if line is None:
                    break
                if number > 0:
                    kept.append(line)
                self._check(line)
        finally:
            self._observer.ends()
            if kept:
                self._summarise(head, kept)

    def _summarise(self, head: Line, kept: list[Line]) -> None:
        whole = [line for line in kept if line["is_complete"]]
        used = whole or kept
        spreads = figures.medians([line["figures"] for line in used])
        self._recorder.add(
            summary_line(
                head,
                spreads,
                repetitions=len(used),
                is_complete=len(whole) == self._options.num_repetitions,
                probe=self._probe,
            )
        )

    async def _repetition(
        self, crew: Crew, requests: Sequence[Request], number: int, run_id: str, rate: float | None
    ) -> Line | None:
        """Reset, send, measure; the line is recorded. None: it was cut before anything came."""
        options = self._options
        await crew.reset()
        mark: tuple[int, ...] = ()
        if options.mode != "offline":
            drawn = random.SystemRandom()
            mark = tuple(drawn.randint(FIRST_ID, LAST_ID - 1) for _ in range(NUM_MARKED))
        sent = workloads.marked(requests, mark) if mark else requests
        self._observer.begins(
            repetition.title(options, number, rate),
            len(sent),
            sum(item.num_tokens for item in sent),
        )
        pids = self._target.pids
        watched = [] if pids is None else list(pids) or crew.pids
        async with Meter(watched) as meter:
            run = await crew.run(
                repetition.jobs(sent, options.seed * 10_000 + number + 100),
                Sampling(temperature=options.temperature),
                self._pace(),
                self._observer.goes_on,
            )
        if run.is_cut and not any(outcome.num_tokens for outcome in run.outcomes):
            return None
        if options.mode == "offline":
            repetition.complete_offline(run, requests)
        found = self._figures(run, requests, meter)
        line: Line = {
            "kind": "repetition",
            "run_id": run_id,
            "repetition": number,
            "is_warm_up": number < 1,
            "is_complete": not run.is_cut,
            "mark": mark,
            "first_error": next((o.error for o in run.outcomes if o.error), ""),
            "first_short": repetition.first_short(run),
            "figures": found,
        }
        self._recorder.add(line)
        self._observer.repetition(line)
        return line

    def _figures(self, run: Run, requests: Sequence[Request], meter: Meter) -> Line:
        context = figures.Context(
            requests=requests,
            targets=self._options.targets,
            cost=self._cost,
            ceilings=self._ceilings,
            has_times=not self._options.is_whole,
        )
        found = figures.figures_of(run, context)
        if self._options.mode != "offline":
            found["client_cpu_s"] = run.client_cpu_s
        if self._is_local:
            found |= self._cpu(meter, found["output_tokens"])
            found["peak_rss_bytes"] = meter.peak_rss_bytes
            found["pss_bytes"] = meter.pss_bytes
            found["device_used_bytes"] = environment.device_used_bytes()
        return found

    def _cpu(self, meter: Meter, num_tokens: int) -> Line:
        """CPU time in sum, and where there are several processes of each, over the tokens."""
        names = self._target.pids or {}
        total_s = sum(meter.cpu_s.values())
        found: Line = {"cpu_s": total_s}
        if num_tokens:
            found["cpu_ms_per_token"] = 1e3 * total_s / num_tokens
            found["cpu_ms_per_token_of"] = {
                names[pid]: 1e3 * used_s / num_tokens
                for pid, used_s in meter.cpu_s.items()
                if pid in names
            }
        return found

    def _pace(self) -> Pace:
        options = self._options
        return Pace(
            concurrency=options.concurrency, is_open=options.is_open, timeout_s=options.timeout_s
        )

    async def _look_at_sampling(self, crew: Crew, requests: Sequence[Request]) -> Line | None:
        """An untimed run of a few requests with logprobs: it warms up, and shows how random it is."""
        some = [
            replace(item, num_tokens=min(item.num_tokens, PROBE_TOKENS), due_s=0.0)
            for item in requests[:PROBE_REQUESTS]
        ]
        self._observer.says("a few untimed requests first")
        sampling = Sampling(temperature=self._options.temperature, num_logprobs=0)
        pace = replace(self._pace(), concurrency=0, is_open=False)
        run = await crew.run(repetition.jobs(some, 0), sampling, pace, lambda done, tokens: None)
        error = next((o.error for o in run.outcomes if o.error), "")
        if error:
            raise BenchFailed(f"the first requests failed: {error}")
        return figures.entropy(run) if run.token_counts else None

    def _check(self, line: Line) -> None:
        """Fail loudly: a figure over answers that are not whole is no figure."""
        found = line["figures"]
        if not line["is_complete"]:
            return
        if found["num_failed"]:
            raise BenchFailed(
                f"{found['num_failed']} of {found['num_requests']} requests failed: "
                f"{line['first_error']}"
            )
        if line["first_short"]:
            raise BenchFailed(f"an answer came back short: {line['first_short']}")
        if found["cached_tokens"] and self._options.workload != "agent":
            self._observer.warns(
                f"{found['cached_tokens']} prompt tokens came from the prefix cache"
            )
