"""The tokens of the sequences that ask for drafts: bounded, and told anew whenever lost."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from finback.shared.drafting.suffix_drafts import MatchPolicy, TokenIds, draft
from finback.shared.wire.messages.draft import Draft, DraftRow

IDLE_S: Final = 120.0
MAX_TOKENS: Final = 4 * 1024 * 1024  # over all sequences, 16 MiB
MAX_DRAFT_TOKENS: Final = 64

# caller's instance and epoch, request id, choice
HistoryKey = tuple[str, int, str, int]


@dataclass(slots=True)
class _History:
    buffer: TokenIds
    num_tokens: int
    used_s: float

    def put(self, position: int, new: TokenIds) -> None:
        """End with `new` at `position`; what was known beyond is taken back."""
        total = position + len(new)
        if total > len(self.buffer):
            grown = np.empty(max(total, 2 * len(self.buffer), 256), np.int32)
            grown[:position] = self.buffer[:position]
            self.buffer = grown
        self.buffer[position:total] = new
        self.num_tokens = total


class Histories:
    """Sequences by key, least recently used out first."""

    def __init__(self, policy: MatchPolicy, *, max_tokens: int = MAX_TOKENS) -> None:
        self._policy = policy
        self._max_tokens = max_tokens
        self._known: OrderedDict[HistoryKey, _History] = OrderedDict()
        self._num_tokens = 0  # room taken, in tokens

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_tokens(self) -> int:
        """Room taken by all sequences, in tokens."""
        return self._num_tokens

    def answer(self, key: HistoryKey, row: DraftRow, now_s: float) -> Draft | None:
        """Take the row's tokens; a guess, what is lacking, or None for no guess."""
        history = self._known.pop(key, None) or _History(np.empty(0, np.int32), 0, now_s)
        self._known[key] = history
        history.used_s = now_s
        if not 0 <= row.position <= history.num_tokens or len(row.token_ids) % 4:
            return Draft(
                request_id=row.request_id,
                choice=row.choice,
                position=row.position,
                need_from=history.num_tokens,
            )
        self._num_tokens -= len(history.buffer)
        history.put(row.position, np.frombuffer(row.token_ids, "<i4"))
        self._num_tokens += len(history.buffer)
        self._evict()
        num_draft_tokens = min(row.num_draft_tokens, MAX_DRAFT_TOKENS)
        guess = draft(history.buffer[: history.num_tokens], num_draft_tokens, self._policy)
        if len(guess) == 0:
            return None
        return Draft(
            request_id=row.request_id,
            choice=row.choice,
            position=history.num_tokens,
            token_ids=guess.astype("<i4", copy=False).tobytes(),
        )

    def end(self, keys: Iterable[HistoryKey]) -> None:
        """Forget sequences."""
        for key in keys:
            history = self._known.pop(key, None)
            if history is not None:
                self._num_tokens -= len(history.buffer)

    def expire(self, now_s: float) -> int:
        """Forget what nobody asked for in two minutes; returns how many."""
        idle = [key for key, known in self._known.items() if now_s - known.used_s >= IDLE_S]
        self.end(idle)
        return len(idle)

    def _evict(self) -> None:
        while self._num_tokens > self._max_tokens and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._num_tokens -= len(oldest.buffer)
