"""Answers mask requests: brings each row to the worker where its sequence is, within a short time.

What is not ready by then is left out of the reply and asked for again, so a slow row holds up nobody;
its answer is kept for the next time it is asked. A worker that ends or is taken away costs its
sequences one exchange: they are answered `need_from 0` and rebuilt from their tokens elsewhere.
"""

import asyncio
from collections import Counter, OrderedDict
from typing import Final

from finback.services.sampler.catalogue import Catalogue, Entry
from finback.services.sampler.compile_desk import CompileDesk
from finback.services.sampler.policy import STUCK_CPU_S, Verdict, judge
from finback.services.sampler.sequences import SequenceKey
from finback.services.sampler.worker_link import Pending, WorkerLink, WorkerLost
from finback.services.sampler.worker_pool import WorkerPool
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, ServingError
from finback.shared.telemetry.logging import get_logger
from finback.shared.wire.messages.sampler import Mask, MaskRequest, MaskRow

# A reply waits for its slowest row no longer than this.
REPLY_S: Final = 0.03
WATCH_S: Final = 0.005
_LATE_S: Final = 0.03
MAX_SEQUENCES: Final = 4096
_MAX_CRASHES: Final = 3  # in a row, before any answer

Caller = tuple[str, int]

_log = get_logger(__name__)


class MaskDesk:
    """Which worker has which sequence, and the rows that are under way."""

    def __init__(self, pool: WorkerPool, catalogue: Catalogue, desk: CompileDesk) -> None:
        self._pool = pool
        self._catalogue = catalogue
        self._desk = desk
        self._pins: OrderedDict[SequenceKey, tuple[WorkerLink, str]] = OrderedDict()
        self._open: OrderedDict[SequenceKey, Pending] = OrderedDict()
        self._compiling: set[asyncio.Task[None]] = set()
        self._crashes: Counter[str] = Counter()
        self._has_work = asyncio.Event()
        self.num_slow = 0

    def __len__(self) -> int:
        """Sequences that have a worker."""
        return len(self._pins)

    async def answer(self, request: MaskRequest) -> tuple[Mask, ...]:
        """The masks that are ready in time, in the order of the rows."""
        caller = (request.instance, request.epoch)
        self._end(request, caller)
        asked = [self._asked(caller, row) for row in request.rows]
        waiting = [pending.answer for pending in asked if not pending.answer.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=REPLY_S)
        done = [pending for pending in asked if pending.answer.done()]
        for pending in done:
            key = (*caller, pending.row.request_id, pending.row.choice)
            if self._open.get(key) is pending:
                del self._open[key]
        return tuple(pending.answer.result() for pending in done)

    # -- rows

    def _asked(self, caller: Caller, row: MaskRow) -> Pending:
        """The row as it is under way; begun now, unless it was asked for before."""
        key = (*caller, row.request_id, row.choice)
        known = self._open.get(key)
        if known is not None and known.is_for(row):
            return known
        pending = Pending(row, asyncio.get_running_loop().create_future())
        self._open[key] = pending
        while len(self._open) > MAX_SEQUENCES:  # of callers that never asked again
            self._open.popitem(last=False)
        self._begin(key, pending)
        return pending

    def _begin(self, key: SequenceKey, pending: Pending) -> None:
        """Settle it here, give it to a worker, or have its grammar compiled first."""
        row = pending.row
        refused = self._catalogue.refusal(row.grammar_id)
        if refused is not None:
            pending.settle(_broken(row, refused))
            return
        entry = self._catalogue.find(row.grammar_id)
        if entry is not None and self._send(key, entry, pending):
            return
        if row.grammar is None:
            pending.settle(_again(row, need_grammar=True))
            return
        task = asyncio.get_running_loop().create_task(self._compile_first(key, pending))
        self._compiling.add(task)
        task.add_done_callback(self._compiling.discard)

    async def _compile_first(self, key: SequenceKey, pending: Pending) -> None:
        row = pending.row
        assert row.grammar is not None
        try:
            entry = await asyncio.shield(self._desk.begin(row.grammar))
        except InvalidRequest as error:
            pending.settle(_broken(row, error))
        except ServingError:  # a busy compiler asks for patience
            pending.settle(_again(row, need_grammar=True))
        else:
            if entry.grammar_id != row.grammar_id:
                wrong = InvalidRequest("the grammar sent along is another one", reason="grammar_id")
                pending.settle(_broken(row, wrong))
            elif not self._send(key, entry, pending):
                pending.settle(_again(row, need_from=row.position))

    def _send(self, key: SequenceKey, entry: Entry, pending: Pending) -> bool:
        """False if no worker can take it now."""
        link = self._worker_of(key, entry)
        if link is None:
            return False
        try:
            if entry.placement == "shared":
                link.load(entry.grammar_id, entry.engine_text)
            link.ask((key[0], key[1]), pending)
        except WorkerLost:
            return False
        self._has_work.set()
        return True

    def _worker_of(self, key: SequenceKey, entry: Entry) -> WorkerLink | None:
        link, grammar_id = self._pins.get(key, (None, ""))
        if link is not None and grammar_id == entry.grammar_id and not link.is_lost:
            self._pins.move_to_end(key)
            return link
        if entry.placement == "own":
            link = self._pool.own_of(entry.grammar_id)
        else:
            link = self._pool.choose(entry.grammar_id, self._loads(entry.grammar_id))
        if link is not None:
            self._pins[key] = (link, entry.grammar_id)
            while len(self._pins) > MAX_SEQUENCES:
                self._pins.popitem(last=False)
        return link

    def _loads(self, grammar_id: str) -> dict[WorkerLink, tuple[int, int]]:
        total = Counter(link for link, _ in self._pins.values())
        same = Counter(link for link, other in self._pins.values() if other == grammar_id)
        return {link: (count, same[link]) for link, count in total.items()}

    # -- workers that are slow, or gone

    async def watch(self) -> None:
        """For ever: find the workers that are too long at one row."""
        while True:
            if not any(link.pending for link in self._pool.links):
                self._has_work.clear()
                await self._has_work.wait()
            woken_s = monotonic_s()
            await asyncio.sleep(WATCH_S)
            if monotonic_s() - woken_s > _LATE_S:
                continue  # late: answers may lie unread, and nobody is convicted unheard
            for link in [*self._pool.shared]:
                self._judge(link, judge(*link.busy_s(), "shared"))
            for link in [*self._pool.own.values()]:
                self._judge(link, judge(*link.busy_s(), "own"))

    def _judge(self, link: WorkerLink, verdict: Verdict) -> None:
        if verdict == "fine" or not link.pending:
            return
        grammar_id = link.pending[0].row.grammar_id
        cpu_s, wall_s = link.busy_s()
        _log.warning(
            "a mask takes long",
            verdict=verdict,
            grammar=grammar_id,
            cpu_ms=round(cpu_s * 1000),
            wall_ms=round(wall_s * 1000),
        )
        if verdict == "slow":
            self.num_slow += 1
            self._catalogue.mark_slow(grammar_id)
            self._pool.give_own(link, grammar_id)
            self._release(link, keep=grammar_id)
        else:
            self._refuse(
                grammar_id, f"a mask of the grammar takes more than {STUCK_CPU_S:g} s", "mask_time"
            )
            self._pool.kill(link)

    def lost(self, link: WorkerLink) -> None:
        """A worker ended: its sequences begin anew elsewhere."""
        if link.pending:
            grammar_id = link.pending[0].row.grammar_id
            # One that had answered may have been killed by others: the count begins anew.
            self._crashes[grammar_id] = 1 if link.num_answered else self._crashes[grammar_id] + 1
            self._catalogue.mark_slow(grammar_id)
            if self._crashes[grammar_id] >= _MAX_CRASHES:
                self._refuse(grammar_id, "the grammar breaks the grammar engine", "engine")
        self._release(link, keep="")
        link.pending.clear()

    def _refuse(self, grammar_id: str, text: str, reason: str) -> None:
        error = InvalidRequest(text, reason=reason)
        self._catalogue.refuse(grammar_id, error)
        for pending in self._open.values():
            if pending.row.grammar_id == grammar_id:
                pending.settle(_broken(pending.row, error))

    def _release(self, link: WorkerLink, *, keep: str) -> None:
        """Let all sequences of a worker go but those of one grammar."""
        gone = [
            key
            for key, (pinned, grammar_id) in self._pins.items()
            if pinned is link and grammar_id != keep
        ]
        for key in gone:
            del self._pins[key]
        for pending in link.pending:
            if pending.row.grammar_id != keep:
                pending.settle(_again(pending.row, need_from=0))

    # -- ends

    def _end(self, request: MaskRequest, caller: Caller) -> None:
        by_worker: dict[WorkerLink, list[tuple[str, int]]] = {}
        for ended in request.ended:
            key = (*caller, *ended)
            link, _ = self._pins.pop(key, (None, ""))
            self._open.pop(key, None)
            if link is not None and not link.is_lost:
                by_worker.setdefault(link, []).append(ended)
        for link, ended_of_it in by_worker.items():
            link.tell_ended(caller, tuple(ended_of_it))


def _again(row: MaskRow, *, need_from: int | None = None, need_grammar: bool = False) -> Mask:
    return Mask(
        request_id=row.request_id,
        choice=row.choice,
        position=row.position,
        need_from=need_from,
        need_grammar=need_grammar,
    )


def _broken(row: MaskRow, error: InvalidRequest) -> Mask:
    return Mask(
        request_id=row.request_id,
        choice=row.choice,
        position=row.position,
        error=error.public_message,
    )
