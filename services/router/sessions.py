"""Which decode instance a conversation was last placed on: a bounded table with expiry. Pure."""

from collections import OrderedDict
from typing import Final

LIFE_S: Final = 180.0
"""As long as the state of a sequence is kept in memory; its blocks are found by their hashes."""
MAX_SESSIONS: Final = 65_536


class SessionTable:
    """(tenant, session) -> instance and epoch, the least recently used first."""

    def __init__(self, *, life_s: float = LIFE_S, max_sessions: int = MAX_SESSIONS) -> None:
        self._life_s = life_s
        self._max_sessions = max_sessions
        self._known: OrderedDict[tuple[str, str], tuple[str, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tenant: str, session: str, now_s: float) -> tuple[str, int] | None:
        """Where the conversation was last; None: it is unknown, has no name, or is too old."""
        known = self._known.get((tenant, session)) if session else None
        if known is None or now_s - known[2] > self._life_s:
            return None
        return known[0], known[1]

    def note(self, tenant: str, session: str, instance: str, epoch: int, now_s: float) -> None:
        """It was placed there now."""
        if not session:
            return
        self._known[tenant, session] = (instance, epoch, now_s)
        self._known.move_to_end((tenant, session))
        while len(self._known) > self._max_sessions:
            self._known.popitem(last=False)

    def sweep(self, now_s: float) -> None:
        """Forget what is too old."""
        while self._known:
            key, known = next(iter(self._known.items()))
            if now_s - known[2] <= self._life_s:
                return
            del self._known[key]
