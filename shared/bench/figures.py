"""The figures of one repetition, from what its clients saw. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finback.shared.bench.crew import Run
from finback.shared.bench.limits import Ceilings, ModelCost, replay
from finback.shared.bench.outcomes import Outcome
from finback.shared.bench.stats import Spread, entropy_bits, summary
from finback.shared.bench.targets import Targets, goodput
from finback.shared.bench.workloads import Request

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What figures need beside a run. `has_times`: single tokens were timed."""

    requests: Sequence[Request]
    targets: Targets | None = None
    cost: ModelCost | None = None
    ceilings: Ceilings | None = None
    has_times: bool = True


def figures_of(run: Run, context: Context) -> Figures:
    """Everything that `docs/benchmarks.md` defines, but CPU and memory."""
    outcomes = run.outcomes
    elapsed_s = elapsed_of(run)
    num_out = sum(outcome.num_tokens for outcome in outcomes)
    num_in = sum(outcome.num_prompt_tokens for outcome in outcomes)
    found: Figures = {
        "elapsed_s": elapsed_s,
        "num_requests": len(outcomes),
        "num_whole": sum(outcome.is_whole for outcome in outcomes),
        "num_refusals": sum(outcome.num_refusals for outcome in outcomes),
        "num_failed": sum(bool(o.error) and not o.is_refused for o in outcomes),
        "prompt_tokens": num_in,
        "cached_tokens": sum(outcome.num_cached_tokens for outcome in outcomes),
        "output_tokens": num_out,
        "output_tokens_per_s": num_out / elapsed_s,
        "prompt_tokens_per_s": num_in / elapsed_s,
        "requests_per_s": sum(outcome.is_whole for outcome in outcomes) / elapsed_s,
    }
    found |= latencies(outcomes) if context.has_times else {}
    if context.targets is not None and outcomes and context.has_times:
        found["goodput"] = goodput(outcomes, context.targets, elapsed_s)
    if context.cost is not None and context.ceilings is not None and not run.is_cut:
        found["limit"] = limit(outcomes, context, context.cost, context.ceilings, elapsed_s)
    if run.token_counts:
        found["entropy"] = entropy(run)
    return found


def elapsed_of(run: Run) -> float:
    """From the start to the last token; to the end of the run if it was cut or brought none."""
    last_s = max((o.last_s for o in run.outcomes if o.last_s is not None), default=0.0)
    return run.elapsed_s if run.is_cut or last_s <= 0 else last_s


def latencies(outcomes: Sequence[Outcome]) -> Figures:
    """Percentiles in seconds over all requests, of ITL over all gaps."""
    return {
        "ttft_s": summary([o.ttft_s for o in outcomes if o.ttft_s is not None]),
        "tpot_s": summary([o.tpot_s for o in outcomes if o.tpot_s is not None]),
        "itl_s": summary([gap for o in outcomes for gap in o.gaps_s]),
        "e2e_s": summary([o.e2e_s for o in outcomes if o.is_whole and o.e2e_s is not None]),
    }


def limit(
    outcomes: Sequence[Outcome],
    context: Context,
    cost: ModelCost,
    ceilings: Ceilings,
    elapsed_s: float,
) -> Figures:
    """What the machine could do at most, and this run's share of that."""
    done = [o for o in outcomes if o.is_whole]
    if not done:
        return {}
    requests = [context.requests[o.index] for o in done]
    work = replay(requests, [o.num_cached_tokens for o in done], cost, ceilings)
    return {
        "limit_s": work.limit_s,
        "share": work.limit_s / elapsed_s,
        "output_tokens_per_s": sum(o.num_tokens for o in done) / work.limit_s,
        "bytes": work.bytes,
        "flops": work.flops,
    }


def entropy(run: Run) -> Figures:
    """Of the tokens that came back: how random they were, and by which measure."""
    counts = dict(enumerate(run.token_counts.values()))
    found: Figures = {
        "empirical_bits": entropy_bits(counts),
        "num_tokens": sum(counts.values()),
        "num_distinct": len(counts),
    }
    if run.surprisals_bits:
        found["surprisal_bits"] = sum(run.surprisals_bits) / len(run.surprisals_bits)
    return found


def share_out_cached(
    outcomes: Sequence[Outcome], requests: Sequence[Request], total: int
) -> list[int]:
    """Cached prompt tokens by request where only their sum is known.

    The requests that come last get theirs first, each at most what it shares with others, then each
    at most its prompt.
    """
    found = [0] * len(outcomes)
    for bound in ("shared", "prompt"):
        for at in reversed(range(len(outcomes))):
            request = requests[outcomes[at].index]
            most = request.num_shared if bound == "shared" else len(request.prompt) - 1
            more = min(total, max(0, most - found[at]))
            found[at] += more
            total -= more
    return found


def flat(figures: Figures, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers by dotted name: `ttft_s.p50`."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def medians(repetitions: Sequence[Figures]) -> dict[str, Spread]:
    """Each figure over the repetitions that have it."""
    values: dict[str, list[float]] = {}
    for figures in repetitions:
        for name, value in flat(figures):
            values.setdefault(name, []).append(value)
    return {name: Spread.of(found) for name, found in values.items()}
