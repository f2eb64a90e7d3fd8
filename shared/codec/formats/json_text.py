"""The text of a JSON string as it comes: escapes resolved, halves of characters waited for."""

import json
import re
from typing import Final

_RUN: Final = re.compile(r'[^"\\]+')
_ESCAPE: Final = re.compile(
    r'\\(?:["\\/bfnrt]'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|u(?![dD][89abAB])[0-9a-fA-F]{4}"
    r"|u[0-9a-fA-F]{4}(?=.))",
    re.DOTALL,
)
# What may still become an escape. A high surrogate waits for its low half.
_PART: Final = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,4}|u[dD][89abAB][0-9a-fA-F]{2}\\(?:u[dD]?[0-9a-fA-F]{0,3})?)?\Z"
)


class JsonText:
    """Reads behind the opening quote. `is_done`: the closing one was read."""

    __slots__ = ("is_done",)

    def __init__(self) -> None:
        self.is_done = False

    def take(self, text: str, *, is_last: bool = False) -> tuple[str, int]:
        """The text that is certain, and how far it was read.

        What is no escape stands for itself, a lone surrogate is U+FFFD.
        """
        pieces, at, end = [], 0, len(text)
        while at < end:
            run = _RUN.match(text, at)
            if run:
                pieces.append(run[0])
                at = run.end()
            elif text[at] == '"':
                self.is_done = True
                return "".join(pieces), at + 1
            else:
                if _PART.match(text, at) and not is_last:
                    break
                found = _ESCAPE.match(text, at)
                pieces.append(_resolved(found[0]) if found else text[at])
                at = found.end() if found else at + 1
        return "".join(pieces), at


def _resolved(escape: str) -> str:
    text = str(json.loads(f'"{escape}"'))
    return "�" if "\ud800" <= text[0] <= "\udfff" else text
