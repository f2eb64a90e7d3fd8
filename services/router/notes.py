"""What this router has placed lately: blocks that an instance will hold before it can say so. Pure.

A note is of a whole prompt, so a later prompt that shares its first k blocks finds the note at block
k. Beyond the 32nd only each 8th block is noted. Notes lie in two generations: when the newer is full
or old the older is forgotten, so that no note outlives 60 s, and most end with their own time.
"""

from collections.abc import Iterable, Sequence
from typing import Final

EXACT: Final = 32
STEP: Final = 8
GENERATION_S: Final = 30.0
MAX_KEYS: Final = 131_072  # of a generation
MAX_HOLDERS: Final = 4  # of one note, the newest; publishers tell of all before long

Note = tuple[tuple[str, int, float], ...]
"""(instance, epoch, until)."""


class PlacementNotes:
    """Noted keys of the last while."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._new: dict[int, Note] = {}
        self._old: dict[int, Note] = {}
        self._since_s = 0.0

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def look(self, keys: Sequence[int]) -> list[tuple[Note, int]]:
        """Runs of sampled keys with the same note, up to the first that has none."""
        new, old = self._new, self._old
        found: list[tuple[Note, int]] = []
        last: Note | None = None
        count = 0
        for key in sampled_keys(keys):
            note = new.get(key) or old.get(key)
            if note is not last:
                if last is not None:
                    found.append((last, count))
                if note is None:
                    return found
                last, count = note, 0
            count += 1
        if last is not None:
            found.append((last, count))
        return found

    def note(
        self,
        keys: Sequence[int],
        before: Sequence[tuple[Note, int]],
        holders: Iterable[tuple[str, int]],
        until_s: float,
        now_s: float,
    ) -> None:
        """These instances will hold these blocks; believed until `until_s`.

        `before` is what `look` found for the keys.
        """
        sampled = sampled_keys(keys)
        if now_s - self._since_s > GENERATION_S or len(self._new) + len(sampled) > self._max_keys:
            self._old, self._new, self._since_s = self._new, {}, now_s
        mine = tuple((name, epoch, until_s) for name, epoch in holders)
        start = 0
        for note, count in before:
            merged = _merge(note, mine, now_s)
            self._new.update(dict.fromkeys(sampled[start : start + count], merged))
            start += count
        self._new.update(dict.fromkeys(sampled[start:], mine))


def depths(found: Sequence[tuple[Note, int]], now_s: float) -> dict[tuple[str, int], int]:
    """(instance, epoch) -> leading blocks that it will hold.

    A note is of all blocks before as well, so no earlier one has to agree.
    """
    held: dict[tuple[str, int], int] = {}
    end = 0
    for note, count in found:
        end += count
        depth = _depth(end)
        for name, epoch, until_s in note:
            if until_s > now_s:
                held[name, epoch] = depth
    return held


def sampled_keys(keys: Sequence[int]) -> Sequence[int]:
    """The keys that are noted: the first 32, then each 8th."""
    if len(keys) <= EXACT:
        return keys
    return [*keys[:EXACT], *keys[EXACT + STEP - 1 :: STEP]]


def _depth(count: int) -> int:
    """Blocks that `count` sampled keys stand for."""
    return count if count <= EXACT else EXACT + (count - EXACT) * STEP


def _merge(before: Note, mine: Note, now_s: float) -> Note:
    names = {(name, epoch) for name, epoch, _ in mine}
    kept = [n for n in before if n[2] > now_s and (n[0], n[1]) not in names]
    return (*mine, *kept)[:MAX_HOLDERS]
