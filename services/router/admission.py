"""Whether the engines have room for a request. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from finback.services.router.fleet import Fleet, Worker, blocks_needed
from finback.shared.errors import InvalidRequest, Overloaded, ServingError

RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
# Tokens that a waiting request is taken to need when the wait is estimated.
_TYPICAL_TOKENS: Final = 64
# A queue before a pool without free blocks hardly moves: it may be this much shorter.
_BLOCKED_QUEUE_DIVISOR: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`max_queue`: requests waiting at one decode."""

    max_queue: int


def refusal(
    workers: Sequence[Worker],
    limits: Limits,
    *,
    num_prompt_tokens: int,
    num_choices: int = 1,
) -> ServingError | None:
    """Why the request is refused, or None. `workers` are those that it could go to."""
    decodes = [w for w in workers if w.is_decode]
    if decodes and all(_never_fits(w, num_prompt_tokens) for w in decodes):
        most = max((w.num_blocks - 1) * w.block_size for w in decodes)
        return InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens, the KV pool holds {max(0, most)}",
            param="messages",
            reason="kv_pool_too_small",
        )
    if decodes and all(is_full(w, limits, num_prompt_tokens, num_choices) for w in decodes):
        return Overloaded(
            "every instance has a full queue",
            reason="queue_full",
            retry_after_s=min(wait_s(w) for w in decodes),
        )
    return None


def has_room(
    fleet: Fleet,
    limits: Limits,
    *,
    num_prompt_tokens: int,
    num_choices: int = 1,
    excluded: Iterable[str] = (),
) -> bool:
    """Whether some decode instance has room; then `refusal` is None. Columns: quick for many."""
    if fleet.is_roomy(num_prompt_tokens, num_choices, limits.max_queue):
        return True  # whoever is left has room; if nobody is, that is no matter of room
    limit = max(1, limits.max_queue // _BLOCKED_QUEUE_DIVISOR)
    prompt_blocks = -(-num_prompt_tokens // fleet.block_size)
    most = np.where(fleet.num_free < prompt_blocks + num_choices, limit, limits.max_queue)
    fits = (fleet.num_blocks == 0) | (prompt_blocks + 1 <= fleet.num_blocks)
    ok = fleet.is_decode & fits & (fleet.num_waiting < most)
    ok[fleet.rows(excluded)] = False
    return bool(ok.any())


def is_full(worker: Worker, limits: Limits, num_prompt_tokens: int, num_choices: int) -> bool:
    """Whether one more waiting request is too many for this decode instance."""
    limit = limits.max_queue
    if worker.num_free_blocks < blocks_needed(worker, num_prompt_tokens, num_choices):
        limit = max(1, limit // _BLOCKED_QUEUE_DIVISOR)
    return worker.num_waiting >= limit


def wait_s(worker: Worker) -> float:
    """A guess at how long until there is room, within sane bounds."""
    speed = max(worker.tokens_per_s, 1.0)
    return min(RETRY_MAX_S, max(RETRY_MIN_S, worker.num_waiting * _TYPICAL_TOKENS / speed))


def _never_fits(worker: Worker, num_prompt_tokens: int) -> bool:
    if worker.num_blocks == 0:  # not reported yet
        return False
    return blocks_needed(worker, num_prompt_tokens) > worker.num_blocks
