"""Where a sequence begins when its block KV and its state are not lost alike. Pure.

Block KV says where a prefix need not be computed; state says where computing may begin. Three things
can happen at a prefix hit of P tokens in blocks:

- a snapshot lies at some S <= P: put it into the slot and compute from S on;
- none does: *replay*. Tokens before P are computed once more, only to get the state at P. Their
  blocks are attended to as they are and never written;
- nothing is there: compute from token 0, which is no replay at all.

How many tokens an exact replay takes: with L window layers of W tokens, what is computed first after
P needs in each window layer the rows P - W + 1 .. P - 1. A row of a layer follows from what enters
the layer at that token. That depends on the blocks before it, which are exact, and on the window of
the window layer below, so each such layer widens the need by W - 1: replaying from P - R, the rows
of window layer number l (from 0) are exact from P - R + l (W - 1) on. The last one's must be exact
from P - (W - 1) on, hence R = L (W - 1). Full layers between them widen nothing.

*Bounded* replay computes fewer tokens, with windows that begin where it begins. That is an
approximation; whoever allows it keeps all its blocks and snapshots under a salt of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

ReplayMode = Literal["exact", "bounded"]
DEFAULT_BOUNDED_TOKENS: Final = 128


def exact_replay_tokens(num_window_layers: int, window_tokens: int) -> int:
    """Tokens before P that give the exact state at P; see the module."""
    return num_window_layers * (window_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRule:
    """`exact_tokens`, `bounded_tokens`: how many tokens the two modes compute again at most.

    A replay begins at a multiple of `align_tokens`, up to so many tokens less one earlier.
    """

    mode: ReplayMode
    exact_tokens: int
    bounded_tokens: int = DEFAULT_BOUNDED_TOKENS
    align_tokens: int = 1

    @property
    def name(self) -> str:
        """Of an approximation, for the salt of all that it may have touched; empty for what is exact."""
        is_exact = self.num_tokens == self.exact_tokens
        return "" if is_exact else f"bounded-{self.bounded_tokens}"

    @property
    def num_tokens(self) -> int:
        """The most that are computed again; never more than exactness needs."""
        if self.mode == "exact":
            return self.exact_tokens
        return min(self.exact_tokens, self.bounded_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Compute from token `position` on. `snapshot`: the position of the snapshot to begin with.

    Without one windows look at nothing before `position`. Tokens from `position` up to the hit are
    a replay.
    """

    position: int
    snapshot: int | None = None


def choose_start(num_kept: int, snapshots: Iterable[int], rule: ReplayRule) -> Start:
    """The start that computes least, with block KV of the first `num_kept` tokens. A snapshot wins a tie.

    `snapshots`: positions; those past `num_kept` are of no use, for their blocks are not here.
    """
    replay = max(0, num_kept - rule.num_tokens) // rule.align_tokens * rule.align_tokens
    best = max((position for position in snapshots if 0 < position <= num_kept), default=0)
    if best and best >= replay:
        return Start(position=best, snapshot=best)
    return Start(position=replay)


def capture_position(num_tokens: int, block_size: int) -> int:
    """Where a prompt's snapshot is taken: its last block's end that is found again by the same prompt.

    The last token of a prompt is always computed, so a hit never reaches the prompt's very end.
    """
    return (num_tokens - 1) // block_size * block_size
