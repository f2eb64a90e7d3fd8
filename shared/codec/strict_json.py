"""JSON to the letter, of texts that a model or a client wrote: what is read can be written again."""

import json
import math
import re
from typing import Any, Final

MAX_DEPTH: Final = 200
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")


def loads_strictly(text: str) -> Any:
    """The value. `ValueError` for what Python's reader lets pass, or reads but cannot give back.

    That is: NaN and infinities, numbers that become infinite, halves of surrogate pairs, and
    nesting that is deeper than `MAX_DEPTH`.
    """
    try:
        found = json.loads(text, parse_constant=_refuse, parse_float=finite)
        if text.count("[") + text.count("{") > MAX_DEPTH:
            _check_depth(found)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if _ESCAPED_SURROGATE.search(text):
        json.dumps(found, ensure_ascii=False).encode()  # its error is a ValueError
    return found


def finite(digits: str) -> float:
    """A number with a point or an exponent."""
    found = float(digits)
    if not math.isfinite(found):
        raise ValueError(f"the number {digits[:40]} is too large")
    return found


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        level = [
            item
            for holder in level
            for item in (holder.values() if isinstance(holder, dict) else holder)
            if isinstance(item, dict | list)
        ]
