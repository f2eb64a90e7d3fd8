"""What followed the last time that the sequence ended like this? Pure.

The longest suffix that occurs earlier wins, and of several occurrences the latest; a suffix shorter
than `min_match` tokens is chance and gives no guess. (Prompt lookup, Saxena 2023; here with suffixes
of up to `max_match` tokens and with guesses that may run into themselves, as in LZ77.)

There is no index to keep in step with the tokens: the candidates, which are the places where the
last `min_match` tokens stood before, are found by comparing whole arrays. That takes about
15 us for 4,096 tokens, adds no memory to the 4 bytes a token, and costs nothing when tokens are
taken back. In a text that repeats itself all over, only the latest candidates are looked at.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

_NONE: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPolicy:
    """A guess needs a match of `min_match` tokens; beyond `max_match` longer is not better.

    `max_candidates`: of the places where `min_match` tokens match, how many of the latest compete.
    """

    min_match: int = 3
    max_match: int = 8
    max_candidates: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.min_match <= self.max_match or self.max_candidates < 1:
            raise ValueError("1 <= min_match <= max_match, and at least one candidate")


def draft(token_ids: TokenIds, num_draft_tokens: int, policy: MatchPolicy) -> TokenIds:
    """A guess of `num_draft_tokens` tokens to follow `token_ids` [n]; empty if there is none."""
    found = find_match(token_ids, policy)
    if found is None or num_draft_tokens < 1:
        return _NONE
    period = len(token_ids) - found
    if period >= num_draft_tokens:
        return token_ids[found : found + num_draft_tokens].copy()
    # The guess reaches the end of what is known and goes on with itself: a loop.
    return np.resize(token_ids[found:], num_draft_tokens)


def find_match(token_ids: TokenIds, policy: MatchPolicy) -> int | None:
    """Where the text goes on after the best earlier occurrence of its own end; None if nowhere."""
    num_tokens, shortest = len(token_ids), policy.min_match
    if num_tokens <= shortest:
        return None
    is_match = token_ids[:-shortest] == token_ids[-shortest]
    for index in range(1, shortest):
        is_match &= token_ids[index : index - shortest] == token_ids[index - shortest]
    # ends: where (exclusive) earlier occurrences of the last tokens end
    ends = np.flatnonzero(is_match)[-policy.max_candidates :] + shortest
    for back in range(shortest + 1, min(policy.max_match, num_tokens - 1) + 1):
        if len(ends) <= 1:
            break
        reaching = ends[ends >= back]
        longer = reaching[token_ids[reaching - back] == token_ids[-back]]
        if len(longer) == 0:
            break
        ends = longer
    return int(ends[-1]) if len(ends) else None
