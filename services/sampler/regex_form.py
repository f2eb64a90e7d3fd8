"""Regular expressions that the engine cannot take, by position, before it sees them.

The engine matches by derivatives: no look-around, no back references, no word boundaries. A counted
repetition is unrolled, so their product is bounded.
"""

import re
from typing import Final

from finback.services.sampler.schema_fault import SchemaFault

MAX_REGEX_CHARS: Final = 16_384
MAX_GROUP_DEPTH: Final = 64
MAX_REPETITION: Final = 100_000  # of the innermost, counting those around it

_QUANTIFIER: Final = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_LOOKS: Final = ("(?=", "(?!", "(?<=", "(?<!")


def check_regex(text: str, *, pointer: str = "regex") -> None:
    """Raises `SchemaFault`; `reason` is the construct, the position is in the text."""
    if len(text) > MAX_REGEX_CHARS:
        raise SchemaFault(
            f"a regular expression of {len(text)} characters; {MAX_REGEX_CHARS} are the limit",
            pointer=pointer,
            reason="regex_length",
        )
    _Scan(text, pointer).run()


class _Scan:
    """One pass over an expression: nesting, quantifiers, what is not supported."""

    def __init__(self, text: str, pointer: str) -> None:
        self._text = text
        self._pointer = pointer
        self._groups: list[tuple[int, int]] = []  # (position, heaviest repetition inside)
        self._heaviest = 1
        self._last = 0  # weight of the item just read; 0: there is none to repeat

    def run(self) -> None:
        at = 0
        while at < len(self._text):
            at = self._step(at)
        if self._groups:
            raise self._fault("a group that is not closed", self._groups[-1][0], "unclosed group")

    def _step(self, at: int) -> int:
        char = self._text[at]
        if char == "\\":
            return self._escape(at)
        if char == "[":
            return self._set(at)
        if char == "(":
            return self._open(at)
        if char == ")":
            return self._close(at)
        if char in "*+?{":
            return self._repeat(at)
        self._last = 0 if char in "|^$" else 1
        return at + 1

    def _escape(self, at: int) -> int:
        if at + 1 == len(self._text):
            raise self._fault("a backslash at the end", at, "escape")
        char = self._text[at + 1]
        if char in "123456789k":
            raise self._fault("back references are not supported", at, "back-reference")
        if char in "bB":
            raise self._fault("word boundaries are not supported", at, "word boundary")
        self._last = 1
        return at + 2

    def _set(self, at: int) -> int:
        """To behind the closing bracket; one that comes first stands for itself."""
        end = at + 1
        if self._text[end : end + 1] == "^":
            end += 1
        if self._text[end : end + 1] == "]" and "]" in self._text[end + 1 :]:
            end += 1
        depth = 1
        while end < len(self._text):
            char = self._text[end]
            if char == "\\":
                end += 1
            elif char == "[" and self._text[end + 1 : end + 2] == ":":
                depth += 1
            elif char == "]":
                depth -= 1
                if not depth:
                    self._last = 1
                    return end + 1
            end += 1
        raise self._fault("a character class that is not closed", at, "unclosed character class")

    def _open(self, at: int) -> int:
        if self._text.startswith(_LOOKS, at):
            raise self._fault("look-around is not supported", at, "look-around")
        if self._text.startswith("(?P=", at):
            raise self._fault("back references are not supported", at, "back-reference")
        if len(self._groups) >= MAX_GROUP_DEPTH:
            raise self._fault(f"groups deeper than {MAX_GROUP_DEPTH}", at, "regex_depth")
        self._groups.append((at, self._heaviest))
        self._heaviest, self._last = 1, 0
        head = re.compile(r"\(\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]*(?=\)))").match(self._text, at)
        return head.end() if head else at + 1

    def _close(self, at: int) -> int:
        if not self._groups:
            raise self._fault("a group that was not opened", at, "unopened group")
        _, outer = self._groups.pop()
        self._last, self._heaviest = self._heaviest, max(outer, self._heaviest)
        return at + 1

    def _repeat(self, at: int) -> int:
        counted = _QUANTIFIER.match(self._text, at)
        if self._text[at] == "{" and counted is None:
            self._last = 1  # a brace that stands for itself
            return at + 1
        if not self._last:
            raise self._fault("nothing to repeat", at, "repetition")
        if counted is None:
            return at + 1
        low, high = int(counted[1]), int(counted[3] or counted[1])
        if counted[3] and high < low:
            raise self._fault("a repetition from more to less", at, "repetition")
        weight = self._last * max(low, high, 1)
        if weight > MAX_REPETITION:
            raise self._fault(
                f"a repetition of {weight} times in all; {MAX_REPETITION} are the limit",
                at,
                "regex_repetition",
            )
        self._last, self._heaviest = weight, max(self._heaviest, weight)
        return counted.end()

    def _fault(self, text: str, at: int, reason: str) -> SchemaFault:
        return SchemaFault(
            f"regular expression, position {at}: {text}", pointer=self._pointer, reason=reason
        )
