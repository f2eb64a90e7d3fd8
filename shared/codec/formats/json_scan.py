"""Follows one JSON value as its text comes: where it ends, and whether it is still JSON."""

import re
from typing import Final

MAX_DEPTH: Final = 256
MAX_SCALAR_CHARS: Final = 1024

_STRING_RUN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_SCALAR_RUN: Final = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPED: Final = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_ESCAPED_PART: Final = re.compile(r"u[0-9a-fA-F]{0,3}\Z")
# What may come next at a place of a value.
_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _DONE = range(7)


class JsonScanner:
    """One value. `is_done`: it is whole; `is_bad`: it is no JSON. Depth and scalars are bounded."""

    __slots__ = (
        "_controls",
        "_escape",
        "_in_string",
        "_scalar",
        "_stack",
        "_state",
        "is_bad",
        "is_done",
    )

    def __init__(self) -> None:
        self.is_done = False
        self.is_bad = False
        # Where in the text being followed a string holds a raw control character.
        self._controls: list[int] = []
        self._stack: list[str] = []
        self._state = _VALUE
        self._in_string = False
        # The part of an escape, and of a number or word, that came so far.
        self._escape: str | None = None
        self._scalar: str | None = None

    def feed(self, text: str, at: int = 0) -> int:
        """Follow `text` from `at` on; where the value ended or broke, or the end of the text."""
        end = len(text)
        while at < end and not (self.is_done or self.is_bad):
            if self._in_string:
                at = self._string(text, at)
            elif self._scalar is not None:
                at = self._word(text, at)
            else:
                found = _BLANKS.match(text, at)
                at = found.end() if found else at
                if at < end and self._structure(text[at]):
                    at += 1
        return at

    def take(self, text: str, at: int = 0) -> tuple[str, int]:
        """As `feed`, and the JSON text followed: raw line breaks within strings come out escaped."""
        end = self.feed(text, at)
        if not self._controls:
            return text[at:end], end
        pieces = []
        for place in self._controls:
            pieces += [text[at:place], f"\\u{ord(text[place]):04x}"]
            at = place + 1
        self._controls.clear()
        return "".join([*pieces, text[at:end]]), end

    def finish(self) -> None:
        """No more text comes: a number at the top is whole now."""
        if self._scalar is not None and not self._stack:
            self._end_word()

    def _string(self, text: str, at: int) -> int:
        if self._escape is not None:
            return self._after_backslash(text, at)
        found = _STRING_RUN.match(text, at)
        if found:
            return found.end()
        if text[at] == "\\":
            self._escape = ""
        elif text[at] == '"':
            self._in_string = False
            if self._state != _COLON:
                self._value_ended()
        else:
            self._controls.append(at)
        return at + 1

    def _after_backslash(self, text: str, at: int) -> int:
        so_far = (self._escape or "") + text[at]
        if _ESCAPED.fullmatch(so_far):
            self._escape = None
        elif _ESCAPED_PART.match(so_far):
            self._escape = so_far
        else:
            self.is_bad = True
            return at
        return at + 1

    def _word(self, text: str, at: int) -> int:
        found = _SCALAR_RUN.match(text, at)
        end = found.end() if found else at
        self._scalar = (self._scalar or "") + text[at:end]
        if len(self._scalar) > MAX_SCALAR_CHARS:
            self.is_bad = True
        elif end < len(text):
            self._end_word()
        return end

    def _end_word(self) -> None:
        word, self._scalar = self._scalar or "", None
        if _SCALAR.fullmatch(word):
            self._value_ended()
        else:
            self.is_bad = True

    def _structure(self, char: str) -> bool:
        """Take one character outside strings and words; False leaves it to the next round."""
        state = self._state
        if char == '"' and state <= _KEY:
            self._in_string = True
            if state in (_FIRST_KEY, _KEY):
                self._state = _COLON
            else:
                self._state = _VALUE
        elif char in "{[" and state <= _FIRST_ITEM and len(self._stack) < MAX_DEPTH:
            self._stack.append(char)
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char in "}]" and self._may_close(char):
            self._stack.pop()
            self._value_ended()
        elif char == ":" and state == _COLON:
            self._state = _VALUE
        elif char == "," and state == _NEXT:
            self._state = _KEY if self._stack[-1] == "{" else _VALUE
        elif state <= _FIRST_ITEM and (char.isascii() and (char.isalnum() or char == "-")):
            self._scalar = ""
            return False
        else:
            self.is_bad = True
            return False
        return True

    def _may_close(self, char: str) -> bool:
        is_object = char == "}"
        if not self._stack or (self._stack[-1] == "{") != is_object:
            return False
        return self._state == _NEXT or self._state == (_FIRST_KEY if is_object else _FIRST_ITEM)

    def _value_ended(self) -> None:
        self.is_done = not self._stack
        self._state = _DONE if self.is_done else _NEXT
