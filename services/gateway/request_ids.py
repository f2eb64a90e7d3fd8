"""Ids of requests: the caller's own where it is usable and new, else a fresh one."""

import re
import secrets
from collections import OrderedDict
from typing import Final

MAX_REMEMBERED: Final = 16_384
_USABLE: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")


class RequestIds:
    """Never gives an id out twice: engines tell attempts of a request apart by its id."""

    def __init__(self) -> None:
        self._used: OrderedDict[str, None] = OrderedDict()

    def choose(self, wanted: str | None) -> str:
        """The id to work under."""
        usable = wanted is not None and _USABLE.match(wanted) and wanted not in self._used
        chosen = wanted if usable and wanted is not None else f"req-{secrets.token_hex(12)}"
        if usable:
            self._used[chosen] = None
            if len(self._used) > MAX_REMEMBERED:
                self._used.popitem(last=False)
        return chosen
