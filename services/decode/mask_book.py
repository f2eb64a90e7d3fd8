"""Pure: what the sampler service knows of each constrained sequence, and what to send it next.

The sampler may restart or be another instance at any time. It says what it lacks (`need_from`,
`need_grammar`) and is told again, so the book holds guesses about its state, never truths.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask, MaskRow

Key = tuple[str, int]
# Completion tokens of a sequence from an index on, int32 LE.
TokensFrom = Callable[[Key, int], bytes]


@dataclass(slots=True)
class _Entry:
    grammar: GrammarSpec
    num_known: int = 0
    wanted: int | None = None
    sends_grammar: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Masked:
    """A mask for the engine: the tokens that may come at completion index `position`."""

    key: Key
    position: int
    bitmask: bytes


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

    @property
    def has_work(self) -> bool:
        """True if a mask is wanted, or an end is to be told."""
        return bool(self._ended) or any(e.wanted is not None for e in self._entries.values())

    def wanted_keys(self) -> list[Key]:
        """The sequences that wait."""
        return [key for key, entry in self._entries.items() if entry.wanted is not None]

    def rows(self, tokens_from: TokensFrom) -> tuple[MaskRow, ...]:
        """One row for each sequence that waits."""
        return tuple(
            _row(key, entry, tokens_from)
            for key, entry in self._entries.items()
            if entry.wanted is not None
        )

    def take_ended(self) -> tuple[Key, ...]:
        """What ended since this was last asked."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def apply(self, masks: Iterable[Mask]) -> MaskAnswers:
        """Take a reply. What it asks for goes out with the next rows."""
        answers = MaskAnswers()
        for mask in masks:
            key = (mask.request_id, mask.choice)
            entry = self._entries.get(key)
            if entry is None or entry.wanted is None:
                continue
            if mask.error:
                answers.broken.append((key, mask.error))
                entry.wanted = None
            elif mask.need_grammar or mask.need_from is not None:
                entry.sends_grammar = entry.sends_grammar or mask.need_grammar
                entry.num_known = 0 if mask.need_from is None else mask.need_from
            elif mask.position == entry.wanted:
                entry.num_known, entry.wanted = mask.position, None
                entry.sends_grammar = False
                answers.masks.append(Masked(key=key, position=mask.position, bitmask=mask.bitmask))
            else:
                entry.num_known = mask.position
        return answers


def _row(key: Key, entry: _Entry, tokens_from: TokensFrom) -> MaskRow:
    position = min(entry.num_known, entry.wanted or 0)
    num_new = (entry.wanted or 0) - position
    return MaskRow(
        request_id=key[0],
        choice=key[1],
        grammar_id=entry.grammar.grammar_id,
        position=position,
        token_ids=tokens_from(key, position)[: num_new * 4],
        grammar=entry.grammar if entry.sends_grammar else None,
    )
