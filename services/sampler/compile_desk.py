"""Compiles each grammar once, in a worker that is killed if it goes over its budget."""

import asyncio
from typing import Any, Final

from finback.services.sampler.catalogue import Catalogue, Entry
from finback.services.sampler.grammar_source import MAX_TEXT_BYTES, grammar_id, param_of
from finback.services.sampler.policy import Measured
from finback.services.sampler.worker import GROWTH_BYTES
from finback.services.sampler.worker_link import WorkerLink, WorkerLost
from finback.services.sampler.worker_pool import WorkerPool
from finback.shared.errors import InvalidRequest, Overloaded
from finback.shared.wire.messages.generate import GrammarSpec

COMPILE_CPU_S: Final = 3.0
COMPILE_WALL_S: Final = 20.0
MAX_COMPILING: Final = 2
MAX_WAITING: Final = 64
_CHECK_S: Final = 0.05
_MAX_LOST: Final = 2


class CompileDesk:
    """Who asks for a grammar that is being compiled waits for the same compilation."""

    def __init__(self, pool: WorkerPool, catalogue: Catalogue) -> None:
        self._pool = pool
        self._catalogue = catalogue
        self._running: dict[str, asyncio.Task[Entry]] = {}
        self._turns = asyncio.Semaphore(MAX_COMPILING)

    async def entry(self, spec: GrammarSpec) -> Entry:
        """The grammar, compiled if need be. Raises `InvalidRequest`, `Overloaded`, `WorkerLost`."""
        found = self._catalogue.find(grammar_id(spec))
        return found if found is not None else await asyncio.shield(self.begin(spec))

    def begin(self, spec: GrammarSpec) -> "asyncio.Task[Entry]":
        """Compile, even if it was compiled before (its own worker may be gone)."""
        wanted_id = grammar_id(spec)
        known = self._catalogue.refusal(wanted_id)
        if known is not None:
            raise known
        task = self._running.get(wanted_id)
        if task is None:
            if len(self._running) >= MAX_WAITING:
                raise Overloaded(
                    "the grammar compiler is busy", reason="compiler_busy", retry_after_s=1.0
                )
            task = asyncio.get_running_loop().create_task(self._compile(spec, wanted_id))
            self._running[wanted_id] = task
            task.add_done_callback(lambda done: self._done(wanted_id, done))
        return task

    def _done(self, wanted_id: str, task: "asyncio.Task[Entry]") -> None:
        self._running.pop(wanted_id, None)
        if not task.cancelled():
            task.exception()  # seen, even if every caller has gone

    async def _compile(self, spec: GrammarSpec, wanted_id: str) -> Entry:
        _check_size(spec)
        async with self._turns:
            link, verdict = await self._tried(spec, wanted_id)
        if "error" in verdict:
            self._pool.give_back(link)
            error = InvalidRequest(
                verdict["error"], param=verdict.get("param"), reason=verdict.get("reason")
            )
            self._catalogue.refuse(wanted_id, error)
            raise error
        return self._keep(link, _entry(spec, wanted_id, verdict))

    async def _tried(self, spec: GrammarSpec, wanted_id: str) -> tuple[WorkerLink, dict[str, Any]]:
        """A verdict and the worker that gave it. One that ends may have been killed by others: the
        second to end over a grammar was ended by it."""
        for _ in range(_MAX_LOST):
            link = await self._pool.take_trial()
            try:
                return link, await self._within_budget(link, spec, wanted_id)
            except WorkerLost:
                if self._pool.is_closed:
                    raise
            except BaseException:
                self._pool.kill(link)
                raise
        raise self._refused(
            wanted_id,
            spec,
            f"the {spec.kind} takes more than {GROWTH_BYTES >> 20} MB to compile,"
            " or breaks the grammar engine",
            "compile_memory",
        )

    def _keep(self, link: WorkerLink, entry: Entry) -> Entry:
        self._catalogue.keep(entry)
        if entry.placement == "own":
            self._pool.give_own(link, entry.grammar_id)
        else:
            link.drop(entry.grammar_id)
            self._pool.give_back(link)
        return entry

    async def _within_budget(
        self, link: WorkerLink, spec: GrammarSpec, wanted_id: str
    ) -> dict[str, Any]:
        """The worker's verdict. Raises `InvalidRequest` over budget, `WorkerLost`."""
        told = {"kind": spec.kind, "text": spec.text, "strictness": spec.strictness}
        asked = asyncio.ensure_future(link.compile(wanted_id, told))
        try:
            while not asked.done():
                await asyncio.wait({asked}, timeout=_CHECK_S)
                cpu_s, wall_s = link.busy_s()
                if cpu_s > COMPILE_CPU_S or wall_s > COMPILE_WALL_S:
                    raise self._refused(
                        wanted_id,
                        spec,
                        f"the {spec.kind} takes more than {COMPILE_CPU_S:g} s to compile",
                        "compile_time",
                    )
            return asked.result()
        finally:
            asked.cancel()

    def _refused(self, wanted_id: str, spec: GrammarSpec, text: str, reason: str) -> InvalidRequest:
        error = InvalidRequest(text, param=param_of(spec.kind), reason=reason)
        self._catalogue.refuse(wanted_id, error)
        return error


def _check_size(spec: GrammarSpec) -> None:
    """Before anything is done with the text: it may be as long as a message."""
    if len(spec.text) > MAX_TEXT_BYTES:
        raise InvalidRequest(
            f"a grammar of {len(spec.text)} characters is above the limit of {MAX_TEXT_BYTES} bytes",
            param=param_of(spec.kind),
            reason="text_bytes",
        )


def _entry(spec: GrammarSpec, wanted_id: str, verdict: dict[str, Any]) -> Entry:
    return Entry(
        grammar_id=wanted_id,
        kind=spec.kind,
        engine=verdict["engine"],
        engine_text=verdict["text"],
        widened=tuple(verdict["widened"]),
        measured=Measured(
            compile_ms=verdict["compile_ms"],
            load_ms=verdict["load_ms"],
            max_mask_ms=verdict["max_mask_ms"],
            num_bytes=verdict["num_bytes"],
        ),
    )
