"""Lengths of time as people write them."""

import re
from typing import Final

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_FORM: Final = re.compile(r"^\s*(\d{1,9})\s*([smhdw])\s*$")
MAX_S: Final = 100 * 366 * 86_400


def seconds_of(text: str) -> int:
    """`90s`, `15m`, `24h`, `30d`, `2w`. Raises `ValueError` that says so, also above a century."""
    found = _FORM.match(text)
    seconds = int(found.group(1)) * _UNITS_S[found.group(2)] if found else MAX_S + 1
    if seconds > MAX_S:
        raise ValueError(f"{text[:40]!r} is no length of time like 15m, 24h, 30d or 2w")
    return seconds
