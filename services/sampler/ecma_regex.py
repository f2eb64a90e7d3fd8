"""Patterns of JSON Schema (ECMA-262) in the engine's syntax (Rust's), where the two differ."""

import re
from typing import Final

# ECMA-262 counts U+FEFF as white space, Unicode (and so the engine) does not.
_BLANK: Final = r"\s\uFEFF"
_NO_BLANK: Final = r"[^\s\uFEFF]"


# Where anything may follow, a count's upper end means nothing, and costs the engine a lot.
_OPEN_END: Final = re.compile(r"(?<!\\)\{(\d+),\d*\}$")


def for_engine(pattern: str) -> str:
    r"""`\s`, `\S` and `\cX` as ECMA-262 means them."""
    if "|" not in pattern:
        pattern = _OPEN_END.sub(r"{\1}", pattern)
    out, at, in_set = [], 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\" and at + 1 < len(pattern):
            taken = pattern[at : at + 2]
            if taken == "\\s":
                out.append(_BLANK if in_set else f"[{_BLANK}]")
            elif taken == "\\S" and not in_set:
                out.append(_NO_BLANK)
            elif taken == "\\c" and pattern[at + 2 : at + 3].isalpha():
                out.append(f"\\x{ord(pattern[at + 2]) % 32:02x}")
                at += 1
            else:
                out.append(taken)
            at += 2
            continue
        if char == "[" and not in_set:
            in_set = True
        elif char == "]":
            in_set = False
        out.append(char)
        at += 1
    return "".join(out)
