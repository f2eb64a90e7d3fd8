"""Reading records into the callers' buffers: neighbours in one call, checked on the copy.

A plain payload goes from the disk straight into a page-aligned buffer of the caller, while its
header page and its last, partial page go to scratch; other buffers cost a copy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import xxhash

from finback.services.cache.segments.buffers import BufferPool, is_aligned
from finback.services.cache.segments.disk import Disk
from finback.services.cache.segments.format import (
    PAGE,
    RecordHeader,
    is_plain_record,
    pages,
    parse_page,
)
from finback.services.cache.segments.keys import KeyRing
from finback.services.cache.segments.open_files import OpenFiles
from finback.services.cache.segments.packing import Packer
from finback.services.cache.segments.record import BlockRecord, Entry, Miss
from finback.services.cache.segments.runs import RUN_BYTES, runs

_THREADS: Final = 3
_RUN_BYTES: Final = 1024 * 1024
_PARTS: Final = 4  # runs of a batch, if they are not too small
_MOST_AHEAD: Final = 4  # runs that wait for a thread, or are read and checked by one

Job = tuple[Entry, memoryview]
Outcome = BlockRecord | Miss


@dataclass(slots=True)
class _Part:
    """A run of a batch whose jobs begin at `first`; `task` reads it unless the caller does."""

    first: int
    numbers: list[int]
    run: list[Job]
    task: "Future[list[Outcome]] | None" = None


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

    def read_many(self, batches: Sequence[Callable[[], Sequence[Job]]]) -> list[Outcome]:
        """Outcomes in the jobs' order; each batch is asked for while the disk reads those before.

        While some runs are read, others are checked. The caller takes its share: a run costs less
        where no thread has to be woken for it.
        """
        outcomes: list[Outcome] = []
        ahead: deque[_Part] = deque()
        try:
            for batch in batches:
                jobs, first = batch(), len(outcomes)
                outcomes += [Miss("absent")] * len(jobs)
                groups = _runs(jobs)
                for numbers in groups:
                    part = _Part(first, numbers, [jobs[number] for number in numbers])
                    if len(batches) > 1 or len(groups) > 1:
                        part.task = self._threads.submit(self._read_run, part.run)
                    ahead.append(part)
                    if len(ahead) > _MOST_AHEAD:
                        self._take(ahead.popleft(), outcomes)
        finally:
            # Whatever happens, nobody writes to the callers' buffers afterwards.
            while ahead:
                self._take(ahead.pop(), outcomes)
        return outcomes

    def _take(self, part: "_Part", outcomes: list[Outcome]) -> None:
        task = part.task
        found = self._read_run(part.run) if task is None or task.cancel() else task.result()
        for number, outcome in zip(part.numbers, found, strict=True):
            outcomes[part.first + number] = outcome

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
        record, place = entry.record, entry.place
        keys = self._keys.of_segment(place.segment_id)
        page = scratch[:PAGE]
        if is_plain_record(page, keys, place.segment_id, place.offset, place.span, record):
            length = record.length
            out[whole:length] = scratch[PAGE : PAGE + length - whole]
            if xxhash.xxh3_128_digest(out[:length]) == record.checksum:
                return record
        try:
            header = self._header(entry, page)
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


def _runs(jobs: Sequence[Job]) -> list[list[int]]:
    """Numbers of jobs that are read with one call each."""
    total = sum(entry.place.span for entry, _ in jobs)
    wanted = min(RUN_BYTES, max(_RUN_BYTES, total // _PARTS))
    even = -(-total // max(1, round(total / wanted)))  # no small one at the end
    groups = runs([(number, entry) for number, (entry, _) in enumerate(jobs)], even)
    return [[number for number, _ in group] for group in groups]


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
