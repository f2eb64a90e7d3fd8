"""Targets of service, and how many requests met them (goodput). Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from finback.shared.bench.outcomes import Outcome
from finback.shared.bench.stats import percentile
from finback.shared.errors import ConfigError

NAMES: Final = ("ttft", "tpot", "itl", "e2e")
_TIME: Final = re.compile(r"^([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)(ms|s)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Limits in seconds; None: no such limit. `itl_s` holds for 99 % of a request's gaps."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None

    def are_met(self, outcome: Outcome) -> bool:
        """A request that failed, was refused or is short meets nothing."""
        if not outcome.is_whole:
            return False
        gaps = sorted(outcome.gaps_s)
        itl_s = percentile(gaps, 99) if gaps else None
        found = (outcome.ttft_s, outcome.tpot_s, itl_s, outcome.e2e_s)
        limits = (self.ttft_s, self.tpot_s, self.itl_s, self.e2e_s)
        return all(
            limit is None or value is None or value <= limit
            for value, limit in zip(found, limits, strict=True)
        )


def parse(text: str) -> Targets:
    """`ttft=200ms,tpot=50ms` as targets. Raises `ConfigError` that names the part."""
    found: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        if name not in NAMES:
            raise ConfigError(f"targets: {name!r} is none of {', '.join(NAMES)}")
        match = _TIME.match(value.strip())
        if match is None or float(match[1]) <= 0:
            raise ConfigError(f"targets: {name} needs a time such as 200ms or 0.2s, not {value!r}")
        found[f"{name}_s"] = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0)
    if not found:
        raise ConfigError("targets: give at least one, such as ttft=200ms")
    return Targets(**found)


def goodput(outcomes: Sequence[Outcome], targets: Targets, elapsed_s: float) -> dict[str, float]:
    """Requests (and their tokens) a second that met all targets, and their share of all."""
    good = [outcome for outcome in outcomes if targets.are_met(outcome)]
    return {
        "requests_per_s": len(good) / elapsed_s,
        "output_tokens_per_s": sum(outcome.num_tokens for outcome in good) / elapsed_s,
        "share": len(good) / len(outcomes),
    }
