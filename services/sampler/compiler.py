"""Compiles grammars against the model's vocabulary, once each, within budgets, and keeps them.

The engine bounds its own work (fuel for lexing, items, states, size), which ends a hostile grammar
within about a second. What is left is bounded by time: a compilation that takes longer is given up,
its thread is left to end by itself, and while too many such threads run nothing new is compiled.
(A thread cannot be killed; killable workers would have to be processes.)
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import anyio
import numpy as np
from anyio import to_thread
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from finback.services.sampler.grammar_source import engine_text, grammar_id, is_exact, param_of
from finback.shared.clock import monotonic_s
from finback.shared.errors import InvalidRequest, Overloaded
from finback.shared.wire.messages.generate import GrammarSpec

COMPILE_TIMEOUT_S: Final = 3.0
MAX_THREADS: Final = 2
CACHE_BYTES: Final = 24 * 1024 * 1024
# What a compiled and used grammar holds, by measurement on real-world schemas (the engine does not
# tell): a floor, and a multiple of its text.
_BASE_BYTES: Final = 320 * 1024
_BYTES_PER_TEXT_BYTE: Final = 64


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar. `start` is a matcher at its beginning: copy it, never advance it."""

    grammar_id: str
    start: LLMatcher
    num_bytes: int
    compile_ms: float


class Vocabulary:
    """The model's tokens as the grammar engine wants them, and the shape of a bitmask."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the logits, which may be above the number of tokens."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = tuple(eos_ids)
        self.bitmask_bytes = -(-vocab_size // 32) * 4

    def bitmask(self, matcher: LLMatcher) -> bytes:
        """Tokens allowed next: int32 LE [ceil(vocab / 32)]; an end token exactly if accepting."""
        mask = bytearray(matcher.compute_bitmask()[: self.bitmask_bytes])
        is_accepting = matcher.is_accepting()
        for token_id in self.eos_ids:
            bit = 1 << (token_id & 7)
            if is_accepting:
                mask[token_id >> 3] |= bit
            else:
                mask[token_id >> 3] &= ~bit
        return bytes(mask)


class GrammarCompiler:
    """A cache of compiled grammars by content, least recently used out first."""

    def __init__(self, vocabulary: Vocabulary, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, Grammar] = OrderedDict()
        self._num_bytes = 0
        self._num_threads = 0
        self._count_lock = threading.Lock()
        self._limits = LLParserLimits(
            initial_lexer_fuel=4_000_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=60_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )

    @property
    def num_cached(self) -> int:
        """Compiled grammars at hand."""
        return len(self._cache)

    @property
    def num_bytes(self) -> int:
        """What they hold, estimated."""
        return self._num_bytes

    def find(self, wanted_id: str) -> Grammar | None:
        """A grammar compiled before; it counts as used."""
        found = self._cache.get(wanted_id)
        if found is not None:
            self._cache.move_to_end(wanted_id)
        return found

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile, or find, off the event loop. Raises `InvalidRequest`, `Overloaded`."""
        wanted_id = grammar_id(spec)
        found = self.find(wanted_id)
        if found is not None:
            return found
        with self._count_lock:
            if self._num_threads >= MAX_THREADS:
                raise Overloaded(
                    "the grammar compiler is busy", reason="compiler_busy", retry_after_s=1.0
                )
            self._num_threads += 1
        with anyio.move_on_after(COMPILE_TIMEOUT_S):
            made = await to_thread.run_sync(self._counted, spec, abandon_on_cancel=True)
            return self._keep(made)
        raise InvalidRequest(
            f"the grammar takes longer than {COMPILE_TIMEOUT_S:g} s to compile",
            param=param_of(spec.kind),
            reason="compile_time",
        )

    def _counted(self, spec: GrammarSpec) -> Grammar:
        try:
            return self._compile(spec)
        finally:
            with self._count_lock:
                self._num_threads -= 1

    def _compile(self, spec: GrammarSpec) -> Grammar:
        started_s = monotonic_s()
        text = engine_text(spec)
        matcher = LLMatcher(self._vocabulary.tokenizer, text, log_level=0, limits=self._limits)
        _check(spec, matcher)
        is_empty = not any(self._vocabulary.bitmask(matcher))
        _check(spec, matcher)
        if is_empty:
            raise InvalidRequest(
                "the grammar allows no text at all", param=param_of(spec.kind), reason="empty"
            )
        self._try_out(spec, matcher)
        return Grammar(
            grammar_id=grammar_id(spec),
            start=matcher,
            num_bytes=_BASE_BYTES + _BYTES_PER_TEXT_BYTE * len(text),
            compile_ms=(monotonic_s() - started_s) * 1000,
        )

    def _try_out(self, spec: GrammarSpec, start: LLMatcher) -> None:
        """One token on, a grammar too wide to be followed shows itself."""
        allowed = np.frombuffer(self._vocabulary.bitmask(start), np.uint8)
        first = int(np.flatnonzero(np.unpackbits(allowed, bitorder="little"))[0])
        if first in self._vocabulary.eos_ids:
            return
        trial = start.deep_copy()
        trial.consume_token(first)
        trial.compute_bitmask()
        _check(spec, trial)

    def _keep(self, grammar: Grammar) -> Grammar:
        known = self._cache.pop(grammar.grammar_id, None)
        self._num_bytes += grammar.num_bytes - (known.num_bytes if known else 0)
        self._cache[grammar.grammar_id] = grammar
        while self._num_bytes > self._cache_bytes and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return grammar


def _check(spec: GrammarSpec, matcher: LLMatcher) -> None:
    """Raise `InvalidRequest` for a grammar that the engine refuses, or serves only nearly."""
    problem = matcher.get_error()
    if not problem and is_exact(spec):
        problem = "; ".join(matcher.get_grammar_warnings())
    if problem:
        raise InvalidRequest(
            f"the {spec.kind} cannot be used: {_shown(problem)}",
            param=param_of(spec.kind),
            reason=_construct(problem),
        )


def _construct(problem: str) -> str:
    """The line of an engine's message that names what it could not take."""
    found = re.search(r"^error: (.+)$", problem, re.MULTILINE)
    return (found.group(1) if found else problem.strip().splitlines()[0])[:200]


def _shown(problem: str) -> str:
    return re.sub(r"\s*<(?:state|non-verbose)[/>].*", "", problem, flags=re.DOTALL).strip()[:1000]
