"""The sampler service's endpoints: compile a grammar, answer masks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, Final

import anyio
from anyio import to_thread

from finback.services.sampler.compiler import Grammar, GrammarCompiler, Vocabulary
from finback.services.sampler.grammar_source import grammar_id
from finback.services.sampler.model_vocabulary import load_engine_tokenizer
from finback.services.sampler.sequences import Sequences
from finback.shared.actor.bus import FRAME_RESERVE_BYTES
from finback.shared.actor.endpoint import Call
from finback.shared.actor.service import Service, ServiceContext
from finback.shared.clock import monotonic_s
from finback.shared.errors import ServingError, Unavailable
from finback.shared.wire.messages.control import InstanceRecord
from finback.shared.wire.messages.sampler import (
    CompileReply,
    CompileRequest,
    Mask,
    MaskReply,
    MaskRequest,
    MaskRow,
)

_TICK_S: Final = 10.0
_ROW_BYTES: Final = 1024  # of a reply, beside the bitmask: ids and an error's text


class SamplerService(Service):
    """Keeps compiled grammars and where each sequence stands; both are rebuilt when lost."""

    name: ClassVar[str] = "sampler"

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        self._compiler: GrammarCompiler | None = None
        self._sequences: Sequences | None = None
        self._bitmask_bytes = 0
        # One request of a decode instance at a time: a repeated one must not race the first.
        self._turns: defaultdict[tuple[str, int], anyio.Lock] = defaultdict(anyio.Lock)

    async def start(self) -> None:
        """Read the model's vocabulary, then answer."""
        loaded = await to_thread.run_sync(load_engine_tokenizer, self.config.model)
        vocabulary = Vocabulary(*loaded)
        self._bitmask_bytes = vocabulary.bitmask_bytes
        self._compiler = GrammarCompiler(vocabulary)
        self._sequences = Sequences(vocabulary)
        await self.add_endpoint("compile", CompileRequest, self._on_compile, scope="both")
        await self.add_endpoint("mask", MaskRequest, self._on_mask, scope="both")
        self.spawn(self._tick)

    def record(self) -> InstanceRecord:
        """Tells the served model."""
        return self.base_record(model=self.config.model_name)

    @property
    def compiler(self) -> GrammarCompiler:
        """The compiler, once started."""
        if self._compiler is None:
            raise Unavailable("the sampler starts")
        return self._compiler

    @property
    def sequences(self) -> Sequences:
        """The sequences' states, once started."""
        if self._sequences is None:
            raise Unavailable("the sampler starts")
        return self._sequences

    async def _on_compile(self, call: Call[CompileRequest]) -> CompileReply:
        spec = call.message.grammar
        found = self.compiler.find(grammar_id(spec))
        outcome = "cached" if found else "compiled"
        try:
            made = found or await self.compiler.compile(spec)
        except ServingError:
            self.metrics.count("finback.sampler.grammars", kind=spec.kind[:20], outcome="refused")
            raise
        self.metrics.count("finback.sampler.grammars", kind=spec.kind, outcome=outcome)
        return CompileReply(
            grammar_id=made.grammar_id,
            is_cached=found is not None,
            compile_ms=0.0 if found else made.compile_ms,
        )

    async def _on_mask(self, call: Call[MaskRequest]) -> MaskReply:
        request = call.message
        caller = (request.instance, request.epoch)
        # Rows that do not fit into one reply are not answered, so they are asked for again.
        rows = request.rows[: self._max_rows()]
        async with self._turns[caller]:
            self.sequences.end((*caller, *ended) for ended in request.ended)
            grammars = [await self._grammar_of(row) for row in rows]
            # A mask takes tens of microseconds, or milliseconds for an odd grammar.
            started_s = monotonic_s()
            masks = await to_thread.run_sync(self._answer, caller, rows, grammars)
        took_s = monotonic_s() - started_s
        self.metrics.observe("finback.sampler.masks_duration", took_s)
        self.metrics.count("finback.sampler.masks", len(masks))
        return MaskReply(masks=masks)

    async def _grammar_of(self, row: MaskRow) -> Grammar | ServingError | None:
        found = self.compiler.find(row.grammar_id)
        if found is not None or row.grammar is None:
            return found
        try:
            return await self.compiler.compile(row.grammar)
        except ServingError as error:
            return error

    def _max_rows(self) -> int:
        num_bytes = self._bitmask_bytes + _ROW_BYTES
        return max(1, (self.context.bus.max_payload - FRAME_RESERVE_BYTES) // num_bytes)

    def _answer(
        self,
        caller: tuple[str, int],
        rows: Sequence[MaskRow],
        grammars: Sequence[Grammar | ServingError | None],
    ) -> tuple[Mask, ...]:
        masks = []
        for row, grammar in zip(rows, grammars, strict=True):
            if isinstance(grammar, ServingError):
                mask = _refused(row, grammar)
            else:
                key = (*caller, row.request_id, row.choice)
                mask = self.sequences.answer(key, row, grammar, monotonic_s())
            masks.append(mask)
        return tuple(masks)

    async def _tick(self) -> None:
        while True:
            self.sequences.expire(monotonic_s())
            for caller in [c for c, turn in self._turns.items() if not turn.statistics().locked]:
                del self._turns[caller]
            self.metrics.gauge("finback.sampler.num_sequences", len(self.sequences))
            self.metrics.gauge("finback.sampler.num_grammars", self.compiler.num_cached)
            self.metrics.gauge("finback.sampler.grammars_size_bytes", self.compiler.num_bytes)
            await anyio.sleep(_TICK_S)


def _refused(row: MaskRow, error: ServingError) -> Mask:
    """A busy compiler asks for patience; any other refusal ends the choice."""
    if error.retryable:
        return Mask(request_id=row.request_id, choice=row.choice, position=0, need_grammar=True)
    return Mask(
        request_id=row.request_id, choice=row.choice, position=0, error=error.public_message
    )
