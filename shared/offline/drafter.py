"""Guesses of coming tokens by prompt lookup, in this process, where they pay.

The same policies as in the service, without the message in between.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from finback.shared.drafting.draft_policy import (
    DraftHistory,
    DraftPolicy,
    after_empty,
    after_step,
    after_verify,
    break_even,
    should_ask,
)
from finback.shared.drafting.suffix_drafts import MatchPolicy, draft
from finback.shared.engine.output import SequenceOutput
from finback.shared.engine.sequence import SequenceKey, TokenIds
from finback.shared.engine.step_times import StepTime

# Steps between two looks at what steps with and without drafts cost.
_WEIGH_EVERY: Final = 8


@dataclass(slots=True)
class _Known:
    """`tokens[:num_tokens]`: prompt and completion of a sequence."""

    tokens: TokenIds
    num_tokens: int
    history: DraftHistory = field(default_factory=DraftHistory)

    def put(self, new: TokenIds) -> None:
        total = self.num_tokens + new.size
        if total > self.tokens.size:
            self.tokens = np.resize(self.tokens, max(total, 2 * self.tokens.size))
        self.tokens[self.num_tokens : total] = new
        self.num_tokens = total


class LocalDrafter:
    """The sequences in the engine; at most 4 bytes a token and as much again."""

    def __init__(self, num_draft_tokens: int, match: MatchPolicy | None = None) -> None:
        """`num_draft_tokens`: most guesses that a step verifies for a sequence."""
        self._policy = DraftPolicy(num_draft_tokens=num_draft_tokens)
        self._match = match or MatchPolicy()
        self._known: dict[SequenceKey, _Known] = {}
        self._num_wants = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: SequenceKey, token_ids: TokenIds) -> None:
        """A sequence with its prompt."""
        self._known[key] = _Known(token_ids.copy(), token_ids.size)

    def end(self, key: SequenceKey) -> None:
        """A sequence is over."""
        self._known.pop(key, None)

    def step(self, row: SequenceOutput) -> None:
        """A sequence has new tokens; learn from what its draft brought."""
        known = self._known.get(row.key)
        if known is not None:
            known.put(row.token_ids)
            known.history = after_verify(
                self._policy, after_step(known.history), row.num_drafted, row.num_accepted
            )

    def drafts(
        self, keys: Sequence[SequenceKey], num_running: int, times: Iterable[StepTime]
    ) -> Iterator[tuple[SequenceKey, int, TokenIds]]:
        """(key, absolute position, guess from there on), for those of `keys` where it pays.

        The step after the next uses it, so that it is long enough for both.
        """
        self._weigh(num_running, times)
        num_tokens = 2 * self._policy.num_draft_tokens + 1
        for key in keys:
            known = self._known.get(key)
            if known is None or not should_ask(self._policy, known.history, num_running):
                continue
            guess = draft(known.tokens[: known.num_tokens], num_tokens, self._match)
            if guess.size:
                yield key, known.num_tokens, guess
            else:
                known.history = after_empty(self._policy, known.history)

    def _weigh(self, num_running: int, times: Iterable[StepTime]) -> None:
        self._num_wants += 1
        if self._num_wants % _WEIGH_EVERY == 0:
            gain = break_even(times, num_running, self._policy.num_draft_tokens)
            if gain is not None:
                self._policy = replace(self._policy, min_gain=gain)
