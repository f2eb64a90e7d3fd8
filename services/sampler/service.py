"""The sampler service's endpoints: compile a grammar, answer masks."""

import os
from dataclasses import replace
from typing import ClassVar, Final

import anyio

from finback.services.sampler.catalogue import Catalogue, Entry
from finback.services.sampler.compile_desk import CompileDesk
from finback.services.sampler.fork_client import ForkClient
from finback.services.sampler.grammar_source import grammar_id
from finback.services.sampler.mask_desk import MaskDesk
from finback.services.sampler.warm_list import read_warm_list
from finback.services.sampler.worker_link import WorkerLink
from finback.services.sampler.worker_pool import WorkerPool
from finback.shared.actor.bus import FRAME_RESERVE_BYTES
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, ServingError, Unavailable
from finback.shared.lanes.byte_ring import RingWriter
from finback.shared.lanes.mask_ring import leave_mask, mask_folder
from finback.shared.telemetry import tracing
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import (
    CompileReply,
    CompileRequest,
    Mask,
    MaskReply,
    MaskRequest,
)

_TICK_S: Final = 10.0
_ROW_BYTES: Final = 1024  # of a reply, beside the bitmask: ids and an error's text
_MAX_SHARED: Final = 2


class SamplerService(Service):
    """Keeps compiled grammars and where each sequence stands; both are rebuilt when lost.

    It touches no grammar itself: workers do, which are killed when they take too long.
    """

    name: ClassVar[str] = "sampler"

    async def start(self) -> None:
        """Have the model's vocabulary read, fork workers, then answer."""
        warm = read_warm_list(self.config.warm_grammars)
        self._forks = ForkClient(self.config.model)
        self._facts = await self._forks.start()
        self._pool = WorkerPool(
            self._forks, max(1, min(_MAX_SHARED, os.cpu_count() or 1)), self._on_lost
        )
        self.catalogue = Catalogue(self._on_evicted)
        self.compiler = CompileDesk(self._pool, self.catalogue)
        self.masks = MaskDesk(self._pool, self.catalogue, self.compiler)
        self._ring = self._open_ring()
        await self._pool.start()
        for loop in (self._pool.keep_filled, self.masks.watch, self._tick):
            self.spawn(loop)
        self.spawn(self._warm_up, warm)
        await self.add_endpoint(
            "compile", CompileRequest, self._on_compile, scope="both", workers=64
        )
        await self.add_endpoint("mask", MaskRequest, self._on_mask, scope="both", workers=64)

    async def stop(self) -> None:
        """End the workers."""
        self._pool.close()
        if self._ring is not None:
            self._ring.close()

    def record(self) -> InstanceRecord:
        """Tells the served model."""
        return self.base_record(model=self.config.model_name)

    @property
    def pool(self) -> WorkerPool:
        """The workers."""
        return self._pool

    async def _on_compile(self, call: Call[CompileRequest]) -> CompileReply:
        spec = call.message.grammar
        self._check_vocabulary(call.message.vocab_size)
        found = self.catalogue.find(grammar_id(spec))
        outcome = "cached" if found else "compiled"
        try:
            entry = found or await self.compiler.entry(spec)
        except ServingError as error:
            self.metrics.count("finback.sampler.grammars", kind=spec.kind[:20], outcome="refused")
            tracing.annotate(**{"finback.grammar.kind": spec.kind[:20], **_why(error)})
            raise
        self.metrics.count("finback.sampler.grammars", kind=spec.kind, outcome=outcome)
        self._trace(entry, outcome)
        return CompileReply(
            grammar_id=entry.grammar_id,
            is_cached=found is not None,
            compile_ms=0.0 if found else entry.measured.compile_ms,
            widened=entry.widened,
            engine=entry.engine,
            placement=entry.placement,
            num_bytes=entry.num_bytes,
        )

    async def _on_mask(self, call: Call[MaskRequest]) -> MaskReply:
        request = call.message
        self._check_vocabulary(request.vocab_size)
        # Rows that do not fit into one reply are not answered, so they are asked for again.
        if len(request.rows) > self._max_rows():
            request = replace(request, rows=request.rows[: self._max_rows()])
        started_s = monotonic_s()
        masks = await self.masks.answer(request)
        self.metrics.observe("finback.sampler.masks_duration", monotonic_s() - started_s)
        self.metrics.count("finback.sampler.masks", len(masks))
        ring = self._ring
        if ring is not None and ring.name in request.rings:
            masks = tuple(leave_mask(ring, mask) for mask in masks)
        return MaskReply(masks=self._within_reply(masks), ring="" if ring is None else ring.name)

    def _open_ring(self) -> RingWriter | None:
        """Shared memory for masks, unless that is not wanted or not there: then messages carry them."""
        if self.config.mask_lane == "message":
            return None
        try:
            return RingWriter(mask_folder(self.config.shm_dir, self.config.stack_id))
        except Unavailable as error:
            self.log.warning("masks go by message", error=error.public_message)
            return None

    async def _warm_up(self, grammars: tuple[GrammarSpec, ...]) -> None:
        """Compile what is asked for often, one after the other, beside the requests."""
        for spec in grammars:
            try:
                await self.compiler.entry(spec)
            except ServingError as error:
                self.log.warning(
                    "a grammar of the warm list is refused",
                    kind=spec.kind,
                    error=error.public_message,
                )

    def _check_vocabulary(self, vocab_size: int) -> None:
        if vocab_size and vocab_size != self._facts.vocab_size:
            raise InvalidRequest(
                f"a vocabulary of {vocab_size} tokens; the sampler's has {self._facts.vocab_size}",
                param="vocab_size",
                reason="vocabulary_mismatch",
            )

    def _within_reply(self, masks: tuple[Mask, ...]) -> tuple[Mask, ...]:
        """As far as one message has room for it, with what lies ahead of each."""
        left = self.context.bus.max_payload - FRAME_RESERVE_BYTES
        left -= len(masks) * (self._facts.bitmask_bytes + _ROW_BYTES)
        fitting = []
        for mask in masks:
            num_bytes = len(mask.ahead_ids) + len(mask.ahead_masks)
            left -= num_bytes
            if num_bytes and left < 0:
                left += num_bytes
                mask = replace(mask, ahead_ids=b"", ahead_masks=b"")
            fitting.append(mask)
        return tuple(fitting)

    def _max_rows(self) -> int:
        num_bytes = self._facts.bitmask_bytes + _ROW_BYTES
        return max(1, (self.context.bus.max_payload - FRAME_RESERVE_BYTES) // num_bytes)

    def _trace(self, entry: Entry, outcome: str) -> None:
        tracing.annotate(
            **{
                "finback.grammar.kind": entry.kind,
                "finback.grammar.engine": entry.engine,
                "finback.grammar.placement": entry.placement,
                "finback.grammar.outcome": outcome,
                "finback.grammar.widened": ", ".join(entry.widened)[:500],
                "finback.grammar.compile_ms": round(entry.measured.compile_ms, 3),
            }
        )

    def _on_lost(self, link: WorkerLink) -> None:
        self.masks.lost(link)

    def _on_evicted(self, entry: Entry) -> None:
        for link in self._pool.shared:
            link.drop(entry.grammar_id)
        own = self._pool.own.get(entry.grammar_id)
        if own is not None:
            self._pool.kill(own)

    async def _tick(self) -> None:
        while True:
            self._pool.retire_grown()
            self.metrics.gauge("finback.sampler.num_sequences", len(self.masks))
            self.metrics.gauge("finback.sampler.num_grammars", len(self.catalogue))
            self.metrics.gauge("finback.sampler.grammars_size_bytes", self.catalogue.num_bytes)
            self.metrics.gauge("finback.sampler.num_workers", len(self._pool.links))
            await anyio.sleep(_TICK_S)


def _why(error: ServingError) -> dict[str, str]:
    return {"finback.grammar.outcome": "refused", "finback.grammar.reason": error.reason or ""}
