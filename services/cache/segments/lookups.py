"""Finding and reading blocks, and what becomes of those that cannot be read."""

from collections.abc import Sequence
from functools import partial
from typing import Final

from finback.services.cache.segments.reader import Job, Outcome
from finback.services.cache.segments.record import BlockRecord, Entry, Miss
from finback.services.cache.segments.state import State
from finback.shared.errors import InvalidRequest

# A block that cannot be read so often is let go: a network file system may only have hiccuped.
_IO_TRIES: Final = 3
# The disk begins with so many blocks while the others are looked up.
_FIRST: Final = 8


class Lookups:
    """Reads; takes `writing` only to let go of a damaged block."""

    def __init__(self, state: State) -> None:
        self._state = state

    def has(self, salt: str, hashes: Sequence[bytes]) -> list[bool]:
        """For each hash whether it is there and not expired."""
        now = self._state.now()
        return self._state.run(lambda: self._has(salt, hashes, now))

    def _has(self, salt: str, hashes: Sequence[bytes], now: float) -> list[bool]:
        index = self._state.index
        expiries = index.expiries(salt, hashes)
        found = []
        for hash_ in hashes:
            expires = expiries.get(hash_)
            is_over = expires is not None and 0 < expires <= now
            found.append(expires is not None and (not is_over or index.is_pinned(salt, hash_)))
        return found

    def find(self, salt: str, hashes: Sequence[bytes]) -> list[Entry | Miss]:
        """The rows of blocks that are there and not expired."""
        now = self._state.now()
        return self._state.run(lambda: self._find(salt, hashes, now))

    def _find(self, salt: str, hashes: Sequence[bytes], now: float) -> list[Entry | Miss]:
        index = self._state.index
        entries = index.get_many(salt, hashes)
        found: list[Entry | Miss] = []
        for hash_ in hashes:
            entry = entries.get(hash_)
            if entry is None:
                found.append(Miss("absent"))
            elif entry.record.is_expired(now) and not index.is_pinned(salt, hash_):
                found.append(Miss("expired"))
            else:
                found.append(entry)
        return found

    def read(self, salt: str, hashes: Sequence[bytes], outs: Sequence[memoryview]) -> list[Outcome]:
        """Read blocks, each into its own buffer; one that was moved meanwhile is tried again."""
        outcomes: list[Outcome] = [Miss("absent")] * len(hashes)
        todo = list(range(len(hashes)))
        entries: dict[int, Entry] = {}
        for _ in range(2):
            todo = self._pass(salt, hashes, outs, todo, entries, outcomes)
            if not todo:
                break
        for outcome in outcomes:
            if isinstance(outcome, Miss):
                self._state.count("misses", reason=outcome.reason)
        self._state.count("hits", sum(not isinstance(outcome, Miss) for outcome in outcomes))
        return outcomes

    def _pass(
        self, salt: str, hashes: Sequence[bytes], outs: Sequence[memoryview], todo: list[int],
        entries: dict[int, Entry], outcomes: list[Outcome],
    ) -> list[int]:  # fmt: skip
        """One try for the blocks numbered `todo`; returns those that were moved meanwhile."""
        jobs: list[tuple[int, Entry]] = []

        def batch(part: Sequence[int]) -> list[Job]:
            begun = len(jobs)
            found = self.find(salt, [hashes[number] for number in part])
            for number, entry in zip(part, found, strict=True):
                if isinstance(entry, Miss):
                    outcomes[number] = entry
                else:
                    jobs.append((number, entry))
            return [_job(entry, outs[number]) for number, entry in jobs[begun:]]

        parts = [part for part in (todo[:_FIRST], todo[_FIRST:]) if part]
        read = self._state.reader.read_many([partial(batch, part) for part in parts])
        again, good = [], []
        for (number, entry), outcome in zip(jobs, read, strict=True):
            outcomes[number] = outcome
            if not isinstance(outcome, Miss):
                good.append(entry)
            elif self._is_moved(entry):
                again.append(number)
                outcomes[number] = Miss("absent", "moved twice while it was read")
            else:
                self._let_go(entry, outcome)
        self._state.touch(good, self._state.now())
        return again

    def _is_moved(self, entry: Entry) -> bool:
        record = entry.record
        now = self._state.run(lambda: self._state.index.get(record.salt, record.hash))
        return now is None or now.place != entry.place

    def _let_go(self, entry: Entry, miss: Miss) -> None:
        """Take out a block that is damaged, gone, or repeatedly unreadable."""
        state = self._state
        if miss.reason == "io":
            with state.lock:
                state.read_errors[entry.row_id] += 1
                if state.read_errors[entry.row_id] < _IO_TRIES:
                    state.log.warning("cannot read from the file tier", error=str(miss))
                    return
                del state.read_errors[entry.row_id]
        with state.writing:
            self._drop(entry, miss)

    def _drop(self, entry: Entry, miss: Miss) -> None:
        state = self._state
        if miss.reason != "absent":
            state.log.warning(
                "a block of the file tier is let go",
                why=str(miss),
                segment=f"{entry.place.segment_id:016x}",
                offset=entry.place.offset,
            )
        try:
            state.erase([entry], miss.reason)
        except OSError:
            state.take_out([entry], miss.reason)


def _job(entry: Entry, out: memoryview) -> Job:
    if out.nbytes < entry.record.length:
        raise InvalidRequest(
            f"out has {out.nbytes} bytes, the block {entry.record.length}", param="out"
        )
    return entry, out


def check_batch(hashes: Sequence[bytes], outs: Sequence[memoryview]) -> None:
    """Raise `InvalidRequest` unless there is a writable flat buffer for each hash."""
    if len(hashes) != len(outs):
        raise InvalidRequest(f"{len(hashes)} hashes and {len(outs)} buffers", param="outs")
    for out in outs:
        if out.readonly or out.ndim != 1 or out.itemsize != 1 or not out.c_contiguous:
            raise InvalidRequest("out must be a writable, contiguous view of bytes", param="out")


def first_or_raise(outcomes: Sequence[Outcome]) -> BlockRecord:
    """The only outcome. Raises `Miss`."""
    [outcome] = outcomes
    if isinstance(outcome, Miss):
        raise outcome
    return outcome
