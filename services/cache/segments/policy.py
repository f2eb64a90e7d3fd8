"""What to evict and which segments to compact. Pure: no file, no clock.

Evicted is by class first (`batch`, then `chat`, then `agent`; others before them all), and within a
class what was not used for longest. Pinned blocks are never offered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from finback.services.cache.segments.segment_table import Segment

CLASSES: Final = ("batch", "chat", "agent")  # evicted in this order
# A segment that is wasted by half costs one byte written for one that is won.
_MOST_WASTE: Final = 0.5
_TIGHT_WASTE: Final = 0.1
_SMALL: Final = 0.25
_FEW_SMALL: Final = 4
# So much of what is held may expire in one sweep, and this many blocks in any case.
_MOST_EXPIRED: Final = 0.1
_LEAST_EXPIRED: Final = 1000


def class_order(known: Iterable[str]) -> list[str]:
    """Classes in the order in which they are evicted."""
    others = sorted(set(known) - set(CLASSES))
    return [*others, *CLASSES]


def expire_limit(num_blocks: int) -> int:
    """How many blocks one sweep may let expire: a wrong clock must not empty the store at once."""
    return max(_LEAST_EXPIRED, int(num_blocks * _MOST_EXPIRED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes on the disk. `spare_bytes` are kept free by the sweep, so that puts need not wait."""

    taken_bytes: int
    max_bytes: int
    spare_bytes: int

    def excess(self, coming_bytes: int = 0) -> int:
        """How much has to go before so much can come; 0 if there is room."""
        return max(0, self.taken_bytes + coming_bytes - self.max_bytes)

    def sweep_excess(self) -> int:
        """How much has to go to leave the spare room."""
        return max(0, self.taken_bytes + self.spare_bytes - self.max_bytes)


def spare_bytes(max_bytes: int, segment_bytes: int) -> int:
    """Room to keep free: a segment, which compaction may need, but at most a tenth."""
    return min(segment_bytes, max_bytes // 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`drop`: segments without live records, to unlink. `copy`: segments to copy out of."""

    drop: tuple[int, ...]
    copy: tuple[int, ...]


def plan_compaction(
    segments: Sequence[Segment], *, active_id: int, segment_bytes: int, budget_bytes: int,
    is_tight: bool = False,
) -> Plan:  # fmt: skip
    """Which own, finished segments to remove and to rewrite, most waste first.

    `is_tight`: room is short, so less waste is worth the copy. The live bytes of all that are copied stay within the budget, but for the first one. Small ones
    (a restart leaves one each) are merged once there are four.
    """
    done = [s for s in segments if s.is_own and s.segment_id != active_id]
    drop = tuple(s.segment_id for s in done if not s.live_bytes)
    live = [s for s in done if s.live_bytes]
    bound = _TIGHT_WASTE if is_tight else _MOST_WASTE
    wasted = [s for s in live if _waste(s) >= bound]
    small = [s for s in live if s.live_bytes < segment_bytes * _SMALL and s not in wasted]
    wanted = sorted(wasted, key=lambda s: (-_waste(s), s.segment_id))
    if len(small) >= _FEW_SMALL:
        wanted += sorted(small, key=lambda s: (s.live_bytes, s.segment_id))
    copy: list[int] = []
    left = budget_bytes
    for segment in wanted:
        if segment.live_bytes > left and copy:
            break
        copy.append(segment.segment_id)
        left -= segment.live_bytes
    return Plan(drop=drop, copy=tuple(copy) if budget_bytes > 0 else ())


def _waste(segment: Segment) -> float:
    return 1 - segment.live_bytes / max(1, segment.taken_bytes)
