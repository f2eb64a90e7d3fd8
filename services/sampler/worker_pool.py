"""The workers: shared ones for masks, own ones for slow grammars, spares for compiling.

A compilation runs in a spare, at a low priority. A quick grammar is loaded into shared workers from
there on; a slow one keeps the worker that compiled it. A shared worker that is caught in a slow mask
becomes that grammar's own, and a fresh worker takes its place.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from finback.services.sampler.fork_client import ForkClient
from finback.services.sampler.policy import WorkerLoad, choose_worker
from finback.services.sampler.worker_link import WorkerLink, WorkerLost
from finback.services.sampler.worker_memory import resident_bytes

MAX_OWN: Final = 4
MAX_IDLE_TRIAL: Final = 2
MAX_GROWTH_BYTES: Final = 64 * 2**20
_RETRY_S: Final = 0.5


class WorkerPool:
    """Keeps `num_shared` shared workers and one fresh spare alive."""

    def __init__(
        self, forks: ForkClient, num_shared: int, on_lost: Callable[[WorkerLink], None]
    ) -> None:
        """`on_lost` hears of every worker that ends, by itself or killed."""
        self._forks = forks
        self._num_shared = num_shared
        self._tell_lost = on_lost
        self.shared: list[WorkerLink] = []
        self.own: OrderedDict[str, WorkerLink] = OrderedDict()
        self._fresh: list[WorkerLink] = []
        self._trial: list[WorkerLink] = []
        self._wanted = asyncio.Event()
        self.num_killed = 0
        self.is_closed = False

    @property
    def links(self) -> list[WorkerLink]:
        """All workers but those that compile at the moment."""
        return [*self.shared, *self.own.values(), *self._fresh, *self._trial]

    @property
    def parent_pid(self) -> int:
        """The process that they are forked from."""
        return self._forks.pid

    async def start(self) -> None:
        """Fork the first workers. Raises `WorkerLost`."""
        for _ in range(self._num_shared):
            self.shared.append(await self._fork())
        self._wanted.set()

    async def keep_filled(self) -> None:
        """For ever: replace the shared workers that went, have a fresh one at hand."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                while len(self.shared) < self._num_shared:
                    self.shared.append(self._fresh.pop() if self._fresh else await self._fork())
                if not self._fresh:
                    self._fresh.append(await self._fork())
            except WorkerLost:
                await asyncio.sleep(_RETRY_S)
                self._wanted.set()

    # -- shared workers

    def choose(self, grammar_id: str, pins: dict[WorkerLink, tuple[int, int]]) -> WorkerLink | None:
        """For a new sequence; `pins`: (sequences, those of this grammar) of each worker."""
        if not self.shared:
            return None
        loads = [
            WorkerLoad(
                num_sequences=pins.get(link, (0, 0))[0],
                num_of_grammar=pins.get(link, (0, 0))[1],
                has_grammar=grammar_id in link.grammars,
            )
            for link in self.shared
        ]
        return self.shared[choose_worker(loads)]

    def give_own(self, link: WorkerLink, grammar_id: str) -> None:
        """A worker is a grammar's alone from now on (it may have been a shared one)."""
        if link in self.shared:
            self.shared.remove(link)
            if self._fresh:
                self.shared.append(self._fresh.pop())
            self._wanted.set()
        self.own[grammar_id] = link
        while len(self.own) > MAX_OWN:
            victim = next((g for g, li in self.own.items() if not li.pending), next(iter(self.own)))
            self.kill(self.own[victim])

    def own_of(self, grammar_id: str) -> WorkerLink | None:
        """The worker that holds a slow grammar; it counts as used."""
        link = self.own.get(grammar_id)
        if link is not None:
            self.own.move_to_end(grammar_id)
        return link

    # -- compiling

    async def take_trial(self) -> WorkerLink:
        """A worker to compile in; give it back, to a grammar or to the spares. Raises `WorkerLost`."""
        if self._trial:
            return self._trial.pop()
        if self._fresh:
            self._wanted.set()
            return self._fresh.pop()
        return await self._fork()

    def give_back(self, link: WorkerLink) -> None:
        """It compiled something that it need not keep."""
        is_big = resident_bytes(link.pid) - link.born_bytes > MAX_GROWTH_BYTES
        if link.is_lost or is_big or len(self._trial) >= MAX_IDLE_TRIAL:
            self._forks.kill(link)
        else:
            self._trial.append(link)

    # -- ends

    def kill(self, link: WorkerLink) -> None:
        """It is over its budget."""
        self.num_killed += 1
        self._forks.kill(link)

    def retire_grown(self) -> int:
        """Replace workers whose memory grew beyond the budget; how many."""
        grown = [
            link
            for link in self.links
            if resident_bytes(link.pid) - link.born_bytes > MAX_GROWTH_BYTES
        ]
        for link in grown:
            self.kill(link)
        return len(grown)

    def close(self) -> None:
        """End all workers."""
        self.is_closed = True
        for link in self.links:
            link.close()
        self._forks.close()

    async def _fork(self) -> WorkerLink:
        link = await self._forks.fork(self._lost)
        link.born_bytes = resident_bytes(link.pid)
        return link

    def _lost(self, link: WorkerLink) -> None:
        for group in (self.shared, self._fresh, self._trial):
            if link in group:
                group.remove(link)
        for grammar_id in [g for g, held in self.own.items() if held is link]:
            del self.own[grammar_id]
        self._wanted.set()
        self._tell_lost(link)
