"""What a tenant may do, and what it is told. Pure."""

from dataclasses import dataclass

from finback.services.router.rate_bucket import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """0: no limit."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    max_concurrency: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One limit as headers tell it: what is left now, and when all of it is back."""

    limit: int
    remaining: int
    reset_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reason` empty: admitted. `is_hopeless`: it will not fit at any time."""

    reason: str = ""
    retry_after_us: int = 0
    is_hopeless: bool = False
    num_open: int = 0
    requests: Rate | None = None
    tokens: Rate | None = None


def to_us(seconds: float) -> int:
    """Microseconds."""
    return int(seconds * 1_000_000)


def rate_of(bucket: Bucket | None) -> Rate | None:
    """Where a limit stands; None: there is none."""
    if bucket is None:
        return None
    return Rate(limit=bucket.limit, remaining=bucket.remaining, reset_us=bucket.reset_us)
