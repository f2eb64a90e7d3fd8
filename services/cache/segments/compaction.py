"""Copying live records out of segments that are mostly dead, within a budget of bytes."""

from finback.services.cache.segments.appending import Appending
from finback.services.cache.segments.policy import plan_compaction
from finback.services.cache.segments.record import Entry, Miss, Place
from finback.services.cache.segments.state import State


class Compaction:
    """Takes `writing` for one record at a time, so that puts and reads go on between."""

    def __init__(self, state: State, appending: Appending) -> None:
        self._state = state
        self._appending = appending

    def run(self, budget_bytes: int, *, is_tight: bool) -> tuple[int, int]:
        """Returns (records moved, segments removed). Raises OSError."""
        state = self._state
        active = state.writer.segment
        segments = state.run(lambda: state.table.all(state.index.live_bytes))
        plan = plan_compaction(
            segments,
            active_id=active.segment_id if active else 0,
            segment_bytes=state.options.segment_bytes,
            budget_bytes=budget_bytes,
            is_tight=is_tight,
        )
        num_moved = sum(self._empty(segment_id) for segment_id in plan.copy)
        num_removed = sum(self._remove(segment_id) for segment_id in (*plan.drop, *plan.copy))
        if num_removed:
            state.log.debug("compacted the file tier", num_moved=num_moved, num_removed=num_removed)
        return num_moved, num_removed

    def _empty(self, segment_id: int) -> int:
        entries = self._state.run(lambda: self._state.index.of_segment(segment_id))
        num_moved = 0
        for entry in entries:
            with self._state.writing:
                num_moved += self._move(entry)
        return num_moved

    def _move(self, entry: Entry) -> bool:
        state, record = self._state, entry.record
        now = state.run(lambda: state.index.get(record.salt, record.hash))
        if now is None or now.place != entry.place:
            return False  # gone meanwhile
        with state.pool.lend(record.length) as out:
            try:
                found = state.reader.read_one(entry, out)
                place, header = self._appending.append(found, out)
            except Miss as miss:
                if miss.reason != "io":
                    state.log.warning("a damaged block is not copied", why=str(miss))
                    state.erase([entry], miss.reason)
                return False
        moved = state.run(lambda: self._point(entry, place, is_packed=header.flags != 0))
        # So that there is never a second copy that a later `forget` would miss.
        state.eraser.erase([entry.place if moved else place], is_final=False)
        return moved

    def _point(self, entry: Entry, place: Place, *, is_packed: bool) -> bool:
        self._state.table.grow(place.segment_id, place.end)
        moved = self._state.index.move(entry, place, is_packed=is_packed)
        self._state.index.database.commit_if_due()
        return moved

    def _remove(self, segment_id: int) -> bool:
        """Unlink a segment without live records; one that still has some stays."""
        state = self._state
        with state.writing:
            active = state.writer.segment
            if active is not None and active.segment_id == segment_id:
                return False
            if state.run(lambda: state.index.of_segment(segment_id, limit=1)):
                return False
            path = state.paths.get(segment_id)
            if path is not None:
                # The copies first, or a power cut could take both.
                state.writer.sync()
                state.disk.unlink(path)
                state.reader.files.drop(path)
            with state.lock:
                state.paths.pop(segment_id, None)
            state.run(lambda: state.table.remove(segment_id))
        return True
