"""Pure: what the drafter knows of each sequence, and which sequences to ask for next.

Positions are absolute: the index of a token in prompt + completion.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from finback.shared.drafting.draft_policy import (
    DraftHistory,
    DraftPolicy,
    after_empty,
    after_step,
    after_verify,
    should_ask,
)
from finback.shared.wire.messages.draft import Draft, DraftRow

Key = tuple[str, int]
# Tokens of a sequence (prompt and completion) from an absolute position on, int32 LE.
TokensFrom = Callable[[Key, int], bytes]


@dataclass(slots=True)
class _Entry:
    num_known: int = 0
    history: DraftHistory = field(default_factory=DraftHistory)
    is_wanted: bool = False


class DraftBook:
    """The sequences of a decode instance that may be drafted."""

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self._entries: dict[Key, _Entry] = {}
        self._ended: list[Key] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def set_min_gain(self, min_gain: float) -> None:
        """What a drafted step must bring on this machine, now that it is known."""
        self._policy = replace(self._policy, min_gain=min_gain)

    def add(self, key: Key) -> None:
        """Start drafting for a sequence."""
        self._entries.setdefault(key, _Entry())

    def end(self, key: Key) -> None:
        """The sequence is over; the drafter is told with the next request."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.num_known:
            self._ended.append(key)

    def take_ended(self) -> tuple[Key, ...]:
        """What ended since this was last asked."""
        ended, self._ended = tuple(self._ended), []
        return ended

    @property
    def has_ended(self) -> bool:
        """True if the drafter keeps state of sequences that are over."""
        return bool(self._ended)

    def step(self, key: Key, num_drafted: int, num_accepted: int) -> None:
        """The sequence took part in a step."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.history = after_verify(
                self._policy, after_step(entry.history), num_drafted, num_accepted
            )

    def want(self, key: Key, num_running: int) -> None:
        """The engine could use a draft for `key`; the policy may think otherwise."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.is_wanted = should_ask(self._policy, entry.history, num_running)

    def take_rows(self, tokens_from: TokensFrom) -> tuple[DraftRow, ...]:
        """One row for each wanted sequence; they are wanted no more."""
        rows = []
        for key, entry in self._entries.items():
            if not entry.is_wanted:
                continue
            entry.is_wanted = False
            token_ids = tokens_from(key, entry.num_known)
            rows.append(
                DraftRow(
                    request_id=key[0],
                    choice=key[1],
                    position=entry.num_known,
                    token_ids=token_ids,
                    num_draft_tokens=2 * self._policy.num_draft_tokens + 1,
                )
            )
            entry.num_known += len(token_ids) // 4
        return tuple(rows)

    def apply(self, rows: tuple[DraftRow, ...], drafts: Iterable[Draft]) -> list[Draft]:
        """Take a reply to `rows`: the drafts that can be tried."""
        answered: dict[Key, Draft] = {(d.request_id, d.choice): d for d in drafts}
        usable = []
        for row in rows:
            key = (row.request_id, row.choice)
            entry, draft = self._entries.get(key), answered.get(key)
            if entry is None:
                continue
            if draft is not None and draft.need_from is not None:
                entry.num_known = min(draft.need_from, entry.num_known)
            elif draft is None or not draft.token_ids:
                entry.history = after_empty(self._policy, entry.history)
            else:
                usable.append(draft)
        return usable

    def forget_sent(self, rows: tuple[DraftRow, ...]) -> None:
        """No answer came to `rows`: the drafter may not have seen their tokens."""
        for row in rows:
            entry = self._entries.get((row.request_id, row.choice))
            if entry is not None:
                entry.num_known = min(entry.num_known, row.position)
