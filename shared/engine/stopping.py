"""Where a completion ends. Pure; the one place that knows.

Tokens past the first stop are never emitted, counted, given logprobs or hashed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from finback.shared.wire.messages.generate import SamplingSpec


@dataclass(frozen=True, slots=True)
class Stop:
    """`num_kept` of the new tokens belong to the completion; `reason` None: it goes on."""

    num_kept: int
    reason: str | None = None
    stop_token_id: int | None = None


def stop_ids(sampling: SamplingSpec, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Tokens that end the completion, and that `min_tokens` forbids until then."""
    eos = () if sampling.ignore_eos else eos_token_ids
    return frozenset((*eos, *sampling.stop_token_ids))


def find_stop(
    new_token_ids: Sequence[int],
    *,
    num_completion: int,
    max_completion: int,
    min_tokens: int,
    stops: frozenset[int],
) -> Stop:
    """The first stop among tokens that follow `num_completion` earlier ones.

    A stop token counts as one only at completion index >= `min_tokens`. Reaching
    `max_completion` (max_tokens, or the context's end) gives `length`; a stop token there, `stop`.
    """
    for index, token_id in enumerate(new_token_ids):
        position = num_completion + index
        if token_id in stops and position >= min_tokens:
            return Stop(index + 1, "stop", token_id)
        if position + 1 >= max_completion:
            return Stop(index + 1, "length")
    return Stop(len(new_token_ids))
