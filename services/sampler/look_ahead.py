"""Along a sequence's next tokens, as far as they are forced or guessed: which they are, and their masks.

Forced is what the mask leaves no choice about, so such tokens are certain. A guess (a drafter's) is
cut where the grammar refuses it. The matcher is where it was afterwards.
"""

import time
from array import array
from dataclasses import dataclass, field
from typing import Final

from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary
from finback.shared.wire.packed_masks import only_token

MAX_AHEAD: Final = 16
# Of processor time; the sequence's own mask is done by then, so less is only less to verify at once.
_BUDGET_S: Final = 0.002


@dataclass(slots=True)
class Ahead:
    """`masks[i]` is what may come behind the first i + 1 of `token_ids`. `is_lost`: so is the matcher."""

    token_ids: list[int] = field(default_factory=list)
    masks: list[bytes] = field(default_factory=list)
    is_lost: bool = False


def look_ahead(
    vocabulary: Vocabulary, matcher: LLMatcher, bitmask: bytes, guess: bytes, max_ahead: int
) -> Ahead:
    """Walk from where the matcher is (`bitmask` is its mask there) and back. `guess`: int32 LE."""
    found = Ahead()
    guessed = array("i", guess[: len(guess) // 4 * 4]).tolist()
    ends_s = time.thread_time() + _BUDGET_S
    while len(found.token_ids) < min(max_ahead, MAX_AHEAD):
        token_id = _next(bitmask, guessed, len(found.token_ids))
        if token_id is None or token_id in vocabulary.eos_ids or time.thread_time() > ends_s:
            break
        if not matcher.consume_token(token_id):
            found.is_lost = True
            return found
        found.token_ids.append(token_id)
        bitmask = vocabulary.bitmask(matcher)
        found.masks.append(bitmask)
        if matcher.get_error() or is_empty(bitmask):
            del found.token_ids[-1], found.masks[-1]
            found.is_lost = True
            return found
    if found.token_ids and not matcher.rollback(len(found.token_ids)):
        found.is_lost = True
    return found


def is_empty(bitmask: bytes) -> bool:
    """Does it allow no token?"""
    return bitmask.count(0) == len(bitmask)


def _next(bitmask: bytes, guessed: list[int], index: int) -> int | None:
    """The token at `index` from here: the only one, or the guessed one if it is allowed."""
    only = only_token(bitmask)
    if only is not None:
        if index < len(guessed) and guessed[index] != only:
            del guessed[index:]  # what was guessed behind another token
        return only
    if index >= len(guessed):
        return None
    token_id = guessed[index]
    is_allowed = 0 <= token_id < 8 * len(bitmask) and bitmask[token_id >> 3] >> (token_id & 7) & 1
    return token_id if is_allowed else None
