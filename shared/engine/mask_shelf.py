"""Masks on their way to the device: what a grammar allows next, by the slot of its sequence.

A mask is needed when the logits are there, not when the step is planned. So a step begins without it,
the sampler computes meanwhile, and the device's thread looks here at the end. No torch.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from finback.shared.clock import monotonic_s
from finback.shared.engine.sequence import Sequence, TokenIds

MASK_WAIT_S: Final = 0.005
"""How long a computed step waits for masks at most; a sequence without is left for a later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSpan:
    """`masks[i]` holds at absolute position `position + i` if `token_ids[:i]` came before it.

    `token_ids`: int32 [len(masks) - 1], a guess that the grammar allows. `owner`: whose it is; its
    slot may have been another's a moment ago. `incarnation`: how often the owner had entered one.
    """

    owner: Sequence
    incarnation: int
    position: int
    token_ids: TokenIds
    masks: tuple[bytes, ...]


def span_of(sequence: Sequence, masks: tuple[bytes, ...], token_ids: TokenIds) -> MaskSpan:
    """Masks for what comes behind the committed tokens of a sequence that has a slot."""
    return MaskSpan(
        owner=sequence,
        incarnation=sequence.incarnation,
        position=sequence.num_tokens,
        token_ids=token_ids,
        masks=masks,
    )


class MaskShelf:
    """The newest span of every slot. `put` may be called from any thread."""

    def __init__(self) -> None:
        self._spans: dict[int, MaskSpan] = {}
        self._changed = threading.Condition()

    def put(self, slot: int, span: MaskSpan) -> None:
        """Replace what lies there."""
        with self._changed:
            self._spans[slot] = span
            self._changed.notify_all()

    def find(
        self, slot: int, owner: Sequence, incarnation: int, tokens: TokenIds, length: int
    ) -> tuple[TokenIds, tuple[bytes, ...]]:
        """(guess [n], masks [n + 1]) behind the `length` known tokens; no masks if there are none."""
        span = self._spans.get(slot)
        if span is None or span.owner is not owner or span.incarnation != incarnation:
            return tokens[:0], ()
        known = length - span.position
        if not 0 <= known < len(span.masks):
            return tokens[:0], ()
        if not np.array_equal(span.token_ids[:known], tokens[span.position : length]):
            return tokens[:0], ()
        return span.token_ids[known:], span.masks[known:]

    def wait(self, is_there: Callable[[], bool], deadline_s: float) -> bool:
        """Wait until `is_there`, which looks here, or (on the monotonic clock) `deadline_s`."""
        with self._changed:
            return self._changed.wait_for(is_there, max(0.0, deadline_s - monotonic_s()))
