"""What is known of grammars by content: those compiled, within a byte budget, and those refused."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from finback.services.sampler.policy import Measured, Placement, placement_of
from finback.shared.errors import InvalidRequest

CACHE_BYTES: Final = 24 * 2**20
MAX_REFUSED: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A grammar that was compiled: the engine's form of it, and what it takes to hold and use it."""

    grammar_id: str
    kind: str
    engine: str
    engine_text: str
    widened: tuple[str, ...]
    measured: Measured

    @property
    def placement(self) -> Placement:
        """Where its masks are computed."""
        return placement_of(self.measured)

    @property
    def num_bytes(self) -> int:
        """What it takes here and in a worker."""
        return self.measured.num_bytes + len(self.engine_text)


class Catalogue:
    """Least recently used out first; `on_evicted` frees what workers hold.

    Refusals are kept too (a few, by number), so that a client that repeats a hostile grammar pays
    for nothing but its message.
    """

    def __init__(
        self, on_evicted: Callable[[Entry], None], *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._on_evicted = on_evicted
        self._cache_bytes = cache_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._refused: OrderedDict[str, InvalidRequest] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, grammar_id: str) -> Entry | None:
        """A compiled grammar; it counts as used."""
        found = self._entries.get(grammar_id)
        if found is not None:
            self._entries.move_to_end(grammar_id)
        return found

    def refusal(self, grammar_id: str) -> InvalidRequest | None:
        """Why it was refused, if it was."""
        known = self._refused.get(grammar_id)
        if known is None:
            return None
        return InvalidRequest(known.public_message, param=known.param, reason=known.reason)

    def keep(self, entry: Entry) -> None:
        """Add a grammar, and let others go for it. The newest stays, whatever its size."""
        known = self._entries.pop(entry.grammar_id, None)
        self.num_bytes += entry.num_bytes - (known.num_bytes if known else 0)
        self._entries[entry.grammar_id] = entry
        while self.num_bytes > self._cache_bytes and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self._on_evicted(oldest)

    def mark_slow(self, grammar_id: str) -> Entry | None:
        """A mask of it stalled a shared worker: from now on it has its own."""
        found = self._entries.get(grammar_id)
        if found is None:
            return None
        slow = replace(found, measured=replace(found.measured, was_slow=True))
        self._entries[grammar_id] = slow
        return slow

    def refuse(self, grammar_id: str, error: InvalidRequest) -> None:
        """It cannot be served; remembered for a while."""
        known = self._entries.pop(grammar_id, None)
        if known is not None:
            self.num_bytes -= known.num_bytes
        self._refused[grammar_id] = error
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
