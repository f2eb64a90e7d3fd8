"""How long a piece of work may still take, on the monotonic clock."""

import math
from dataclasses import dataclass

from finback.shared.clock import monotonic_s


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock; `inf` means none."""

    at_s: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """A deadline that many seconds from now."""
        return cls(monotonic_s() + seconds)

    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at_s - monotonic_s())

    @property
    def is_expired(self) -> bool:
        return monotonic_s() >= self.at_s
