"""Control tokens in a prompt: the template's become ids, the same spellings in user text do not.

User strings are rendered with a private mark behind the first character of everything that looks
like a control spelling. A spelling in the rendered text is therefore the template's own. The marks
are then taken out again.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from finback.shared.errors import InvalidRequest

# Private-use characters: one that occurs nowhere else in the prompt is the mark.
_MARKS: Final = range(0xF700, 0xF800)
_PRIVATE: Final = re.compile("[\uf700-\uf7ff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """A token outside the byte-level vocabulary. `lstrip`/`rstrip` swallow blanks beside it."""

    token_id: int
    spelling: str
    is_special: bool = True
    lstrip: bool = False
    rstrip: bool = False


class ControlTokens:
    """The control tokens of a vocabulary, found by spelling."""

    def __init__(self, tokens: Iterable[ControlToken]) -> None:
        # A one-character spelling cannot be broken by a mark, so it is never recognised in text.
        self.by_spelling = {token.spelling: token for token in tokens if len(token.spelling) > 1}
        self._spelling = _any_of(self.by_spelling)
        self._beginning = _any_of({spelling[:2] for spelling in self.by_spelling})

    def may_occur(self, text: str) -> bool:
        """Does the text hold the beginning of a control spelling (so that it needs marks)."""
        return self._beginning is not None and self._beginning.search(text) is not None

    def mark(self, text: str, mark: str) -> str:
        """`text` with every beginning of a control spelling broken by `mark`."""
        if self._beginning is None:
            return text
        return self._beginning.sub(lambda found: found[0][0] + mark + found[0][1], text)

    def split(self, text: str) -> Iterator[str | ControlToken]:
        """Plain stretches and control tokens, in order; empty stretches are left out."""
        if self._spelling is None:
            yield from [text] if text else []
            return
        position, rstrip = 0, False
        for found in self._spelling.finditer(text):
            token = self.by_spelling[found[0]]
            plain = _trim(text[position : found.start()], rstrip, token.lstrip)
            if plain:
                yield plain
            yield token
            position, rstrip = found.end(), token.rstrip
        plain = _trim(text[position:], rstrip, False)
        if plain:
            yield plain

    def spellings_in(self, text: str) -> list[str]:
        """The control spellings of a text, in order."""
        return [] if self._spelling is None else self._spelling.findall(text)


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _trim(text: str, at_start: bool, at_end: bool) -> str:
    text = text.lstrip() if at_start else text
    return text.rstrip() if at_end else text


def unused_marks(texts: Iterable[str]) -> tuple[str, str]:
    """Two private-use characters that none of the texts holds."""
    # The usual text has none at all, which a pattern finds out faster than a set of characters.
    used = set().union(*(_PRIVATE.findall(text) for text in texts))
    free = [chr(value) for value in _MARKS if chr(value) not in used][:2]
    if len(free) < 2:
        raise InvalidRequest(
            "the messages use every private-use character that could mark their text",
            param="messages",
        )
    return free[0], free[1]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested maps and lists in which every string (keys too) went through `change`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_strings(item, change) for item in value]
    return value


def strings_in(value: Any) -> list[str]:
    """Every string of nested maps and lists, keys included."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    map_strings(value, keep)
    return found
