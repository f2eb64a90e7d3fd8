"""What a store tells about itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from finback.services.cache.segments.state import State
from finback.services.cache.segments.usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """`total` and `by_*` are of own blocks, `others` those of other writers that can be read.

    `taken_bytes` is on the disk, of `max_bytes`. `counts`: what happened since the start, by name
    and reason. `ignored`: files that are left alone, and why.
    """

    total: Usage
    by_class: Mapping[str, Usage]
    by_tenant: Mapping[str, Usage]
    by_salt: Mapping[str, Usage]
    others: int
    taken_bytes: int
    max_bytes: int
    num_segments: int
    num_pins: int
    counts: Mapping[str, int]
    ignored: Mapping[str, str]
    is_read_only: bool
    is_direct: bool
    is_index_lasting: bool


def stats(state: State) -> StoreStats:
    """A snapshot. May raise `IndexDamaged`."""
    return state.run(lambda: _stats(state))


def _stats(state: State) -> StoreStats:
    usage = state.index.usage
    segments = state.table.all(state.index.live_bytes)
    [(num_others,)] = state.index.database.run("SELECT count(*) FROM blocks WHERE NOT is_own")
    return StoreStats(
        total=usage.total(),
        by_class=usage.by("traffic_class"),
        by_tenant=usage.by("tenant"),
        by_salt=usage.by("salt"),
        others=num_others,
        taken_bytes=state.table.taken_bytes(),
        max_bytes=state.options.max_bytes,
        num_segments=sum(segment.is_own for segment in segments),
        num_pins=len(state.keeper.pins),
        counts=dict(state.counts),
        ignored=dict(state.keeper.ignored),
        is_read_only=state.is_read_only,
        is_direct=state.disk.is_direct,
        is_index_lasting=state.keeper.is_lasting,
    )
