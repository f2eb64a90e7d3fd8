"""The regular upkeep: expiry, quota, compaction, other writers' news, and a commit."""

from dataclasses import dataclass
from typing import Final

from finback.services.cache.segments.appending import Appending
from finback.services.cache.segments.compaction import Compaction
from finback.services.cache.segments.database import IndexDamaged
from finback.services.cache.segments.eviction import Eviction
from finback.services.cache.segments.state import State

_LONGEST_S: Final = 10.0  # a budget is not saved up for longer
_MOST_EVICTED: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep did."""

    num_expired: int = 0
    num_evicted: int = 0
    num_moved: int = 0
    num_segments_removed: int = 0
    is_folder_gone: bool = False  # open the store again to go on


class Sweeping:
    """Called every few seconds; each call is bounded in what it erases and copies."""

    def __init__(self, state: State, eviction: Eviction, appending: Appending) -> None:
        self._state = state
        self._eviction = eviction
        self._compaction = Compaction(state, appending)
        self._last_s = state.options.monotonic()

    def sweep(self) -> Swept:
        """Never raises for a disk that is full or failing: logs, and tries again next time."""
        state = self._state
        if state.folder_lock is not None and not state.folder_lock.is_in_place:
            state.log.error(
                "the folder of the file tier is gone, with all blocks in it",
                folder=str(state.options.own_folder),
            )
            return Swept(is_folder_gone=True)
        try:
            self._keep_lock()
            if state.is_read_only:
                with state.writing:
                    state.refresh_others()
                return Swept()
            return self._sweep()
        except (OSError, IndexDamaged) as error:
            state.log.warning("the file tier's upkeep failed", error=str(error))
            state.count("sweeps_failed")
            return Swept()

    def _sweep(self) -> Swept:
        state = self._state
        now = state.now()
        state.blocked_until_s = 0.0
        with state.writing:
            num_expired = self._eviction.expire(now)
        with state.writing:
            num_evicted = self._eviction.fit_quota(_MOST_EVICTED)
        is_tight = self._eviction.room().sweep_excess() > 0
        num_moved, num_removed = self._compaction.run(self._budget(), is_tight=is_tight)
        with state.writing:
            state.refresh_others()
            state.writer.sync()
        state.flush()
        return Swept(
            num_expired=num_expired,
            num_evicted=num_evicted,
            num_moved=num_moved,
            num_segments_removed=num_removed,
        )

    def _budget(self) -> int:
        now_s = self._state.options.monotonic()
        elapsed_s, self._last_s = min(now_s - self._last_s, _LONGEST_S), now_s
        return int(self._state.options.compact_bytes_s * elapsed_s)

    def _keep_lock(self) -> None:
        state = self._state
        lock = state.folder_lock
        if lock is None or lock.renew(state.options.now()):
            return
        with state.writing:
            state.log.error(
                "another writer took the folder over; it is only read from now on",
                folder=str(state.options.own_folder),
            )
            state.writer.finish_quietly()
            state.become_reader()
