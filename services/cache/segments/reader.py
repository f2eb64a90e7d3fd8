"""Reading records into the callers' buffers: neighbours in one call, checked on the copy.

A plain payload goes from the disk straight into a page-aligned buffer of the caller, while its
header page and its last, partial page go to scratch; other buffers cost a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import xxhash

from finback.services.cache.segments.buffers import BufferPool, is_aligned
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.format import PAGE, RecordHeader, pages, parse_page
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.open_files import OpenFiles
from finback.services.cache.segments.packing import Packer
from finback.services.cache.segments.record import BlockRecord, Entry, Miss
from finback.services.cache.segments.runs import RUN_BYTES, runs

_THREADS: Final = 3
_LEAST_RUN_BYTES: Final = 1024 * 1024
_MOST_AHEAD: Final = 4  # runs that are read before the first of them is checked

Job = tuple[Entry, memoryview]
Outcome = BlockRecord | Miss


class RecordReader:
    """Reads by entries of the index; knows nothing of what they mean."""

    def __init__(
        self,
        disk: Disk,
        pool: BufferPool,
        keys: KeyRing,
        packer: Packer,
        path_of: Callable[[int], Path],
    ) -> None:
        self._disk = disk
        self._pool = pool
        self._keys = keys
        self._packer = packer
        self._path_of = path_of
        self.files = OpenFiles(disk)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="segments")

    def close(self) -> None:
        """Finish what runs and close the files."""
        self._threads.shutdown(wait=True)
        self.files.close()

    def read_one(self, entry: Entry, out: memoryview) -> BlockRecord:
        """Raises `Miss`, after which the contents of `out` mean nothing."""
        [outcome] = self._read_run([(entry, out)])
        if isinstance(outcome, Miss):
            raise outcome
        return outcome

    def read_many(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes in the jobs' order. The disk works on the next runs while one is checked."""
        outcomes: list[Outcome] = [Miss("absent")] * len(jobs)
        total = sum(entry.place.span for entry, _ in jobs)
        groups = runs(
            [(number, entry) for number, (entry, _) in enumerate(jobs)],
            min(RUN_BYTES, max(_LEAST_RUN_BYTES, total // _MOST_AHEAD)),
        )
        for group, found in self._overlapped(groups, jobs):
            for number, outcome in zip(group, found, strict=True):
                outcomes[number] = outcome
        return outcomes

    def _overlapped(
        self, groups: list[list[tuple[int, Entry]]], jobs: Sequence[Job]
    ) -> Iterator[tuple[list[int], list[Outcome]]]:
        if len(groups) == 1:
            numbers = [number for number, _ in groups[0]]
            yield numbers, self._read_run([jobs[number] for number in numbers])
            return
        ahead: list[tuple[list[int], Future[list[Outcome]]]] = []
        for group in groups:
            numbers = [number for number, _ in group]
            task = self._threads.submit(self._read_run, [jobs[number] for number in numbers])
            ahead.append((numbers, task))
            if len(ahead) >= _MOST_AHEAD:
                first, task = ahead.pop(0)
                yield first, task.result()
        for first, task in ahead:
            yield first, task.result()

    def _read_run(self, run: Sequence[Job]) -> list[Outcome]:
        try:
            if run[0][0].is_packed:
                return [self._read_copied(*run[0])]
            return self._read_straight(run)
        except Miss as miss:
            return [miss] * len(run)
        except FileNotFoundError:
            return [Miss("absent", "the segment is gone")] * len(run)
        except (OSError, ValueError, OverflowError) as error:
            return [Miss("io", str(error))] * len(run)

    def _read_copied(self, entry: Entry, out: memoryview) -> Outcome:
        """Through a buffer of the pool."""
        place = entry.place
        with self._pool.lend(place.span) as span:
            with self.files.use(self._path_of(place.segment_id)) as fd:
                length = self._disk.read(fd, [span], place.offset)
            header = self._header(entry, span[:PAGE])
            stored = span[PAGE : PAGE + header.stored]
            if length < PAGE + header.stored:
                return Miss("corrupt", "the segment is cut")
            record, payload = self._packer.unpack(header, stored, place.segment_id, place.offset)
            if len(payload) != record.length:
                return Miss("corrupt", "the payload has another length")
            out[: record.length] = payload
        return _checked(record, entry, out)

    def _read_straight(self, run: Sequence[Job]) -> list[Outcome]:
        """Plain records that follow each other, into their callers' aligned buffers."""
        first = run[0][0].place
        wholes = [_whole_pages(entry, out) for entry, out in run]
        spans = [entry.place.span for entry, _ in run]
        with self._pool.lend(sum(spans) - sum(wholes)) as scratch:
            views, starts, begun, at = [], [], 0, 0
            for (_, out), whole, span in zip(run, wholes, spans, strict=True):
                starts.append(at)
                if whole:
                    # What is left of the record before lies right before this one's header page.
                    views += [scratch[begun : at + PAGE], out[:whole]]
                    begun = at + PAGE
                at += span - whole
            views += [scratch[begun:at]] if at > begun else []
            with self.files.use(self._path_of(first.segment_id)) as fd:
                num_read = self._disk.read(fd, views, first.offset)
            outcomes: list[Outcome] = []
            for (entry, out), whole, start in zip(run, wholes, starts, strict=True):
                if entry.place.end - first.offset > num_read:
                    outcomes.append(Miss("corrupt", "the segment is cut"))
                else:
                    outcomes.append(self._finish(entry, out, scratch[start:], whole))
            return outcomes

    def _finish(self, entry: Entry, out: memoryview, scratch: memoryview, whole: int) -> Outcome:
        """Check a record whose first `whole` bytes are in `out`, the others behind its header."""
        try:
            header = self._header(entry, scratch[:PAGE])
        except Miss as miss:
            return miss
        length = header.record.length
        if header.flags or header.stored != length:
            return Miss("corrupt", "the index takes a packed record for a plain one")
        out[whole:length] = scratch[PAGE : PAGE + length - whole]
        return _checked(header.record, entry, out)

    def _header(self, entry: Entry, page: memoryview) -> RecordHeader:
        """The header, if it is the one that the index speaks of. Raises `Miss`."""
        place = entry.place
        keys = self._keys.of_segment(place.segment_id)
        header = parse_page(bytes(page), keys, place.segment_id, place.offset)
        if header is None:
            raise Miss("corrupt", "the record's header is damaged")
        if not isinstance(header, RecordHeader):
            raise Miss("absent", "the record was erased")
        record = header.record
        if (record.salt, record.hash) != (entry.record.salt, entry.record.hash):
            raise Miss("absent", "another record lies there")
        if record.length != entry.record.length or header.span != place.span:
            raise Miss("corrupt", "the index does not fit the record")
        return header


def _checked(record: BlockRecord, entry: Entry, out: memoryview) -> Outcome:
    if xxhash.xxh3_128_digest(out[: record.length]) != record.checksum:
        return Miss("corrupt", "the payload does not fit its checksum")
    known = entry.record
    return replace(record, expires_unix_s=known.expires_unix_s, used_unix_s=known.used_unix_s)


def _whole_pages(entry: Entry, out: memoryview) -> int:
    """Bytes of the payload that are read into `out` itself."""
    if not is_aligned(out, PAGE):
        return 0
    return pages(entry.record.length + 1) - PAGE
