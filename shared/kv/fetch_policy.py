"""How many cached blocks are worth fetching, rather than computed again. Pure.

Fetching n leading blocks takes a fixed time and then a time for each, which depends on the tier; it
spares the computation of n blocks. Rates are measured; what was never measured is tried.
"""

from dataclasses import dataclass
from typing import Final

_SMOOTHING: Final = 0.3
# A tier that seemed too slow is tried again at every so-many-th chance: it may be faster by now.
EXPLORE_EVERY: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRates:
    """Seconds; 0 means not measured. `compute_block_s`: for the prompt tokens of one block."""

    compute_block_s: float = 0.0
    overhead_s: float = 0.0
    host_block_s: float = 0.0
    file_block_s: float = 0.0


def blocks_worth_fetching(num_found: int, num_host: int, rates: FetchRates) -> int:
    """Of `num_found` leading blocks, the first `num_host` in memory: how many to fetch.

    The gain is linear in each tier, so the best number is none, all of the host's, or all.
    """
    num_host = min(num_host, num_found)
    if not rates.compute_block_s:
        return num_found
    best, most = 0, 0.0
    for count in (num_host, num_found):
        gain = gain_s(count, num_host, rates)
        if gain > most or (gain == most and best):
            best, most = count, gain
    return best


def gain_s(count: int, num_host: int, rates: FetchRates) -> float:
    """Seconds that fetching `count` blocks spares."""
    if not count:
        return 0.0
    num_files = max(0, count - num_host)
    cost = (count - num_files) * rates.host_block_s + num_files * rates.file_block_s
    return count * rates.compute_block_s - cost - rates.overhead_s


class RateBook:
    """Measured rates, smoothed; and when to try what they speak against."""

    def __init__(self) -> None:
        self._rates = {"host": 0.0, "file": 0.0, "overhead": 0.0}
        self._num_refused = 0

    def record(self, tier: str, seconds: float) -> None:
        """One block of `tier` took that long (or a whole fetch that long besides: `overhead`)."""
        before = self._rates[tier]
        self._rates[tier] = seconds if not before else before + _SMOOTHING * (seconds - before)

    def rates(self, compute_block_s: float) -> FetchRates:
        """What is known."""
        return FetchRates(
            compute_block_s=compute_block_s,
            overhead_s=self._rates["overhead"],
            host_block_s=self._rates["host"],
            file_block_s=self._rates["file"],
        )

    def choose(self, num_found: int, num_host: int, compute_block_s: float) -> int:
        """`blocks_worth_fetching`, or all of them when it is time to measure again."""
        count = blocks_worth_fetching(num_found, num_host, self.rates(compute_block_s))
        if count >= num_found:
            return count
        self._num_refused += 1
        return num_found if self._num_refused % EXPLORE_EVERY == 0 else count
