"""Ranges of steps as spans: a span a token would cost more than the token.

A sequence's `decode steps` span covers at most 32 steps or 250 ms, with what happened in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Key = tuple[str, int]
# (name, start_ns, end_ns, parent, attributes), times on the wall clock.
Record = Callable[[str, int, int, Any, dict[str, Any]], None]

MAX_STEPS: Final = 32
MAX_NS: Final = 250_000_000


@dataclass(slots=True)
class _Range:
    parent: Any
    start_ns: int
    end_ns: int
    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rows: int = 0


class StepSpans:
    """Collects the steps of each traced sequence and records them in ranges."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._open: dict[Key, _Range] = {}

    def add(
        self,
        key: Key,
        parent: Any,
        start_ns: int,
        end_ns: int,
        *,
        num_rows: int,
        num_tokens: int,
        num_drafted: int,
        num_accepted: int,
    ) -> None:
        """Count one step; the range is recorded when it has grown long enough."""
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = _Range(parent, start_ns, end_ns)
        found.end_ns = max(end_ns, found.end_ns)
        found.num_steps += 1
        found.num_tokens += num_tokens
        found.num_drafted += num_drafted
        found.num_accepted += num_accepted
        found.num_rows += num_rows
        if found.num_steps >= MAX_STEPS or found.end_ns - found.start_ns >= MAX_NS:
            self.close(key)

    def close(self, key: Key) -> None:
        """Record what is collected of a sequence."""
        found = self._open.pop(key, None)
        if found is None:
            return
        attributes = {
            "finback.request_id": key[0],
            "finback.choice": key[1],
            "finback.num_steps": found.num_steps,
            "finback.num_tokens": found.num_tokens,
            "finback.num_drafted": found.num_drafted,
            "finback.num_accepted": found.num_accepted,
            "finback.mean_rows": round(found.num_rows / max(1, found.num_steps), 2),
        }
        self._record("decode steps", found.start_ns, found.end_ns, found.parent, attributes)
