"""From a list of requests to a run's jobs and words, and from a run to what its line says. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from finback.shared.bench import figures, workloads
from finback.shared.bench.crew import Run
from finback.shared.bench.load import Job
from finback.shared.bench.options import BenchOptions
from finback.shared.bench.record import Line
from finback.shared.bench.workloads import Request


def jobs(requests: Sequence[Request], salt: int) -> list[Job]:
    """Seeds differ by request and repetition, and are the same in every bench."""
    return [
        Job(
            index=at,
            prompt=item.prompt,
            num_tokens=item.num_tokens,
            seed=salt * 1_000_003 + at,
            due_s=item.due_s,
        )
        for at, item in enumerate(requests)
    ]


def complete_offline(run: Run, requests: Sequence[Request]) -> None:
    """Prompt tokens are known, cached ones in sum; a stream's chunks say neither."""
    key = "num_cached_tokens"
    total = run.stats["after"][key] - run.stats["before"][key]
    cached = figures.share_out_cached(run.outcomes, requests, total)
    run.outcomes = [
        replace(
            outcome,
            num_prompt_tokens=len(requests[outcome.index].prompt) if outcome.num_tokens else 0,
            num_cached_tokens=count,
        )
        for outcome, count in zip(run.outcomes, cached, strict=True)
    ]


def first_short(run: Run) -> str:
    """The first answer that ended with fewer tokens than were asked for, in words; else empty."""
    for o in run.outcomes:
        if not (o.error or o.is_cut or o.is_whole):
            return f"request {o.index} has {o.num_tokens} tokens of {o.num_wanted}"
    return ""


def described(options: BenchOptions, requests: Sequence[Request], rate: float | None) -> Line:
    """The workload as the record and a comparison know it."""
    return {
        "name": options.workload,
        "digest": workloads.digest(requests),
        "num_requests": len(requests),
        "prompt_tokens": sum(len(item.prompt) for item in requests),
        "output_tokens": sum(item.num_tokens for item in requests),
        "rate_per_s": rate,
        "scale": options.scale,
        "concurrency": options.concurrency,
        "clients": options.clients,
        "seed": options.seed,
        "temperature": options.temperature,
        "is_whole": options.is_whole,
        "targets": asdict(options.targets) if options.targets else None,
    }


def title(options: BenchOptions, number: int, rate: float | None) -> str:
    """What the progress says: the workload, its rate and which repetition."""
    at = f" at {rate:g}/s" if rate is not None else ""
    which = f"{number} of {options.num_repetitions}" if number > 0 else "warm-up"
    return f"{options.workload}{at}, {which}"
