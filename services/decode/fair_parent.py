"""Which trace a message for many sequences belongs to: the one that was chosen least.

A span has one parent. Taking turns lets every traced request show the drafter and the sampler.
"""

from collections.abc import Callable, Sequence
from typing import Any

Key = tuple[str, int]


class FairParent:
    """Counts how often each sequence was the parent of a shared message."""

    def __init__(self, parent_of: Callable[[Key], Any]) -> None:
        self._parent_of = parent_of
        self._turns: dict[Key, int] = {}

    def choose(self, keys: Sequence[Key]) -> Any:
        """The trace context of the key with the fewest turns; None without keys."""
        if not keys:
            return None
        key = min(keys, key=lambda k: self._turns.get(k, 0))
        self._turns[key] = self._turns.get(key, 0) + 1
        return self._parent_of(key)

    def forget(self, key: Key) -> None:
        """The sequence is over."""
        self._turns.pop(key, None)
