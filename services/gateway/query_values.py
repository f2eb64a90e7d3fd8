"""Parameters of a query string, which are text, as the values that a checked body has."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}
_INTEGER: Final = re.compile(r"-?[0-9]{1,16}")


def typed(
    fields: Mapping[str, Any],
    *,
    booleans: Sequence[str] = (),
    numbers: Sequence[str] = (),
    lists: Sequence[str] = (),
) -> dict[str, Any]:
    """Text that spells a boolean, a number, or one item of a list; other text is left as it is."""
    found = dict(fields)
    for name in booleans:
        if isinstance(found.get(name), str):
            found[name] = _BOOLEANS.get(found[name].lower(), found[name])
    for name in numbers:
        if isinstance(found.get(name), str) and _INTEGER.fullmatch(found[name]):
            found[name] = int(found[name])
    for name in lists:
        if isinstance(found.get(name), str):
            found[name] = [found[name]]
    return found
