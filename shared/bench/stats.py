"""Percentiles, medians with their spread, entropy. Pure, over plain numbers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest of the ascending values (numpy's default)."""
    if not ordered:
        raise ValueError("no values")
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p95, p99, mean and max of some values; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    found = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {**found, "mean": math.fsum(ordered) / len(ordered), "max": ordered[-1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median of repetitions, with the least and the largest of them."""

    median: float
    low: float
    high: float
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        return cls(
            median=percentile(ordered, 50), low=ordered[0], high=ordered[-1], num=len(ordered)
        )

    @property
    def relative(self) -> float:
        """(high - low) / median; 0 where the median is 0."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0

    def overlaps(self, other: "Spread") -> bool:
        """Whether the two ranges have a value in common."""
        return self.low <= other.high and other.low <= self.high


def entropy_bits(counts: Mapping[int, int]) -> float:
    """Shannon entropy of the distribution that the counts make, in bits.

    Of N tokens it is at most log2(N), however random they were.
    """
    total = sum(counts.values())
    if not total:
        return 0.0
    shares = [count / total for count in counts.values() if count]
    return abs(-math.fsum(share * math.log2(share) for share in shares))
