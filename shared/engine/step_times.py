"""How long a step takes by its number of rows, recorded from the first step on. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

_SMOOTHING: Final = 0.2
_WINDOW_S: Final = 3.0
_CHUNK_ROWS: Final = 32
"""From so many rows on a step takes time by the row, and what one row takes is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A row of the table: steps of `low` to `high` rows. Times in milliseconds."""

    low: int
    high: int
    num_steps: int
    mean_ms: float
    recent_ms: float


def bucket_of(num_rows: int) -> int:
    """1, 2, ... 7, then four buckets an octave: where a step of so many rows is counted."""
    if num_rows < 4:
        return num_rows
    octave = num_rows.bit_length() - 1
    return 4 * (octave - 2) + (num_rows >> (octave - 2))


def bucket_range(bucket: int) -> tuple[int, int]:
    """The least and most rows that `bucket_of` puts there."""
    if bucket < 4:
        return bucket, bucket
    scale = bucket // 4 - 1
    low = (4 + bucket % 4) << scale
    return low, low + (1 << scale) - 1


class StepTimes:
    """The table, and what the last seconds brought."""

    def __init__(self) -> None:
        self._sum_ms: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._recent_ms: dict[int, float] = {}
        self._last_ms = 0.0
        self._row_ms = 0.0
        self._tokens: deque[tuple[float, int]] = deque()

    def record(self, num_rows: int, duration_ms: float) -> None:
        """Count one step."""
        bucket = bucket_of(num_rows)
        before = self._recent_ms.get(bucket, duration_ms)
        self._recent_ms[bucket] = before + _SMOOTHING * (duration_ms - before)
        self._sum_ms[bucket] = self._sum_ms.get(bucket, 0.0) + duration_ms
        self._count[bucket] = self._count.get(bucket, 0) + 1
        smooth = _SMOOTHING if self._last_ms else 1.0
        self._last_ms += smooth * (duration_ms - self._last_ms)
        if num_rows >= _CHUNK_ROWS:
            smooth = _SMOOTHING if self._row_ms else 1.0
            self._row_ms += smooth * (duration_ms / num_rows - self._row_ms)

    def record_tokens(self, now_s: float, num_tokens: int) -> None:
        """Count tokens that went out."""
        self._tokens.append((now_s, num_tokens))
        self._prune(now_s)

    def tokens_per_s(self, now_s: float) -> float:
        """Tokens of the last three seconds, a second."""
        self._prune(now_s)
        return sum(count for _, count in self._tokens) / _WINDOW_S

    def expected_ms(self, num_rows: int) -> float | None:
        """What a step of so many rows took lately; None if there was none (nor a larger one).

        A larger one's time is an upper bound.
        """
        wanted = bucket_of(num_rows)
        known = [bucket for bucket in self._recent_ms if bucket >= wanted]
        return self._recent_ms[min(known)] if known else None

    def rows_within(self, limit_ms: float) -> int | None:
        """Rows that a step of many can take in so many milliseconds, a whole number of 32 and at least
        64; None while no such step was seen.
        """
        if not self._row_ms:
            return None
        return max(2, int(limit_ms / self._row_ms) // _CHUNK_ROWS) * _CHUNK_ROWS

    @property
    def row_ms(self) -> float:
        """What a row of a step of many takes; 0 while there was none."""
        return self._row_ms

    @property
    def step_time_ms(self) -> float:
        """Smoothed time of the last steps."""
        return self._last_ms

    def table(self) -> tuple[StepTime, ...]:
        """The table, by rows."""
        rows = []
        for bucket in sorted(self._count):
            low, high = bucket_range(bucket)
            count = self._count[bucket]
            rows.append(
                StepTime(
                    low=low,
                    high=high,
                    num_steps=count,
                    mean_ms=self._sum_ms[bucket] / count,
                    recent_ms=self._recent_ms[bucket],
                )
            )
        return tuple(rows)

    def _prune(self, now_s: float) -> None:
        while self._tokens and self._tokens[0][0] < now_s - _WINDOW_S:
            self._tokens.popleft()
