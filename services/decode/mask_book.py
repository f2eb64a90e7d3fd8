"""Pure: what the sampler service knows of each constrained sequence, and what to send it next.

The sampler may restart or be another instance at any time. It says what it lacks (`need_from`,
`need_grammar`) and is told again, so the book holds guesses about its state, never truths.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask, MaskRow

# Tokens along the grammar that a reply may bring masks for; the engine takes what it has room for.
MAX_AHEAD: Final = 16
_RETRY_S: Final = 0.1
# A new sampler asks for the grammar, then for the tokens.
_MAX_FRUITLESS: Final = 2

Key = tuple[str, int]
# Completion tokens of a sequence from an index on, int32 LE.
TokensFrom = Callable[[Key, int], bytes]


@dataclass(slots=True)
class _Entry:
    grammar: GrammarSpec
    num_known: int = 0
    wanted: int | None = None
    sends_grammar: bool = False
    asked: MaskRow | None = None
    num_fruitless: int = 0
    not_before_s: float = 0.0
    # (completion index, int32 LE), and whether it is yet to be told on its own
    guess: tuple[int, bytes] | None = None
    is_guess_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """A mask for the engine: the tokens that may come at completion index `position`.

    `ahead_ids`, `ahead_masks`: as in `Mask`.
    """

    key: Key
    position: int
    bitmask: bytes
    ahead_ids: bytes = b""
    ahead_masks: bytes = b""


@dataclass(slots=True)
class MaskAnswers:
    """What a reply brought: masks to use, and sequences whose grammar is broken (with why)."""

    masks: list[Masked] = field(default_factory=list)
    broken: list[tuple[Key, str]] = field(default_factory=list)


class MaskBook:
    """The constrained sequences of a decode instance."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._ended: list[Key] = []

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def add(self, key: Key, grammar: GrammarSpec) -> None:
        """Start constraining a sequence."""
        self._entries[key] = _Entry(grammar)

    def end(self, key: Key) -> None:
        """The sequence is over; the sampler is told with the next request, at the latest soon."""
        if self._entries.pop(key, None) is not None:
            self._ended.append(key)

    def want(self, key: Key, position: int) -> None:
        """The engine cannot go on with `key` before it has the mask for `position`."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.wanted = position

    def guess(self, key: Key, position: int, token_ids: bytes) -> None:
        """A drafter's guess (int32 LE) for completion indexes from `position` on; a newer one counts."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.guess, entry.is_guess_new = (position, token_ids), True

    @property
    def has_work(self) -> bool:
        """True if a mask is wanted, or an end is to be told."""
        return bool(self._ended) or any(e.wanted is not None for e in self._entries.values())

    def retry_s(self) -> float | None:
        """When (on the clock of `take_rows`) a sequence that was told to wait may ask again."""
        times = [
            entry.not_before_s
            for entry in self._entries.values()
            if entry.wanted is not None and entry.asked is None
        ]
        return min(times, default=None)

    def wanted_keys(self) -> list[Key]:
        """The sequences that wait."""
        return [key for key, entry in self._entries.items() if entry.wanted is not None]

    def take_rows(self, tokens_from: TokensFrom, now_s: float = 0.0) -> tuple[MaskRow, ...]:
        """One row for each sequence that waits, or has a new guess, and is not asked for already."""
        rows = []
        for key, entry in self._entries.items():
            if entry.asked is not None or entry.not_before_s > now_s:
                continue
            if entry.wanted is None and not entry.is_guess_new:
                continue
            row = _row(key, entry, tokens_from)
            entry.is_guess_new = False
            if entry.wanted is not None or row.guess_ids:
                entry.asked = row
                rows.append(row)
        return tuple(rows)

    def forget_asked(self, rows: Iterable[MaskRow]) -> None:
        """No answer came to these, or none that counts: they may be asked for again."""
        for row in rows:
            entry = self._entries.get((row.request_id, row.choice))
            if entry is not None and entry.asked is row:
                entry.asked = None

    def take_ended(self) -> tuple[Key, ...]:
        """What ended since this was last asked."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def apply(
        self, rows: Iterable[MaskRow], masks: Iterable[Mask], now_s: float = 0.0
    ) -> MaskAnswers:
        """Take a reply to `rows`. What it asks for goes out with the next rows; who asks back too often waits."""
        answers = MaskAnswers()
        asked = {(row.request_id, row.choice): row for row in rows}
        for mask in masks:
            key = (mask.request_id, mask.choice)
            entry = self._entries.get(key)
            if entry is None or entry.asked is None or entry.asked is not asked.get(key):
                continue  # over, or begun anew meanwhile
            entry.asked = None
            if mask.error:
                answers.broken.append((key, mask.error))
                entry.wanted = None
            elif mask.need_grammar or mask.need_from is not None:
                entry.sends_grammar = entry.sends_grammar or mask.need_grammar
                entry.num_known = 0 if mask.need_from is None else mask.need_from
                entry.num_fruitless += 1
                if entry.num_fruitless > _MAX_FRUITLESS:
                    entry.not_before_s = now_s + _RETRY_S
            else:
                self._take(answers, key, entry, mask)
        return answers

    def _take(self, answers: MaskAnswers, key: Key, entry: _Entry, mask: Mask) -> None:
        """A mask that is wanted, or (for its guess) one of the index that was last told."""
        entry.num_known = mask.position
        entry.sends_grammar, entry.num_fruitless = False, 0
        is_wanted = entry.wanted == mask.position
        if is_wanted:
            entry.wanted = None
        if is_wanted or (entry.wanted is None and mask.ahead_ids):
            answers.masks.append(
                Masked(
                    key=key,
                    position=mask.position,
                    bitmask=mask.bitmask,
                    ahead_ids=mask.ahead_ids,
                    ahead_masks=mask.ahead_masks,
                )
            )


def _row(key: Key, entry: _Entry, tokens_from: TokensFrom) -> MaskRow:
    end = entry.num_known if entry.wanted is None else entry.wanted
    position = min(entry.num_known, end)
    num_new = end - position
    return MaskRow(
        request_id=key[0],
        choice=key[1],
        grammar_id=entry.grammar.grammar_id,
        position=position,
        token_ids=tokens_from(key, position)[: num_new * 4],
        grammar=entry.grammar if entry.sends_grammar else None,
        guess_ids=_guess_from(key, entry, end, tokens_from),
        max_ahead=MAX_AHEAD,
    )


def _guess_from(key: Key, entry: _Entry, index: int, tokens_from: TokensFrom) -> bytes:
    """What the guess says from a completion index on; nothing if it was wrong before that."""
    if entry.guess is None:
        return b""
    begin, token_ids = entry.guess
    num_known = 4 * (index - begin)
    if not 0 <= num_known < len(token_ids) or (
        token_ids[:num_known] != tokens_from(key, begin)[:num_known]
    ):
        if num_known > 0:
            entry.guess = None
        return b""
    return token_ids[num_known:]
