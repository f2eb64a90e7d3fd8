"""Compiles one grammar with the engine and says what that took. Runs in a worker process.

The engine bounds its own work by fuel (lexing, items, states, size). What fuel does not bound, time
and memory, is bounded from outside: the process is killed (`worker_pool`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from finback.services.sampler.engine_faults import readable
from finback.services.sampler.grammar_source import Source, is_exact, param_of, read_source
from finback.services.sampler.worker_memory import allocated_bytes
from finback.shared.errors import InvalidRequest
from finback.shared.wire.messages.generate import GrammarSpec

# A copy of the beginning, what a sequence leaves behind in the shared lexer.
_BASE_BYTES: Final = 96 * 1024
_BYTES_PER_TEXT_BYTE: Final = 8
_TRIAL_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """A compiled grammar. `start` is a matcher at its beginning: copy it, never advance it.

    `num_bytes`: what the allocator gave for it, or an estimate by the text's length if that is more.
    Times are the processor's. `compile_ms` is the whole, up to the first mask; `load_ms` what another worker would spend on the
    engine's form of it. `max_mask_ms`: the slowest of the masks of a short walk.
    """

    grammar_id: str
    start: LLMatcher
    source: Source
    num_bytes: int
    compile_ms: float
    load_ms: float
    max_mask_ms: float


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
        mask += bytes(self.bitmask_bytes - len(mask))  # logits that no token belongs to
        is_accepting = matcher.is_accepting()
        for token_id in self.eos_ids:
            bit = 1 << (token_id & 7)
            if is_accepting:
                mask[token_id >> 3] |= bit
            else:
                mask[token_id >> 3] &= ~bit
        return bytes(mask)


def engine_limits() -> LLParserLimits:
    """The fuel of a grammar: about 80 ms of lexing to begin with, about 15 ms a mask."""
    return LLParserLimits(
        initial_lexer_fuel=4_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=60_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def compile_grammar(vocabulary: Vocabulary, spec: GrammarSpec, grammar_id: str) -> Grammar:
    """Analyse, compile and try out a client's grammar. Raises `InvalidRequest`."""
    started_s, held_bytes = time.process_time(), allocated_bytes()
    source = read_source(spec)
    loaded_s = time.process_time()
    matcher = load_grammar(vocabulary, source.text)
    _check(spec, matcher)
    mask_ms = [_timed_mask(vocabulary, matcher)]
    _check(spec, matcher)
    ended_s = time.process_time()
    if not any(vocabulary.bitmask(matcher)):
        raise InvalidRequest(
            "the grammar allows no text at all", param=param_of(spec.kind), reason="empty"
        )
    mask_ms += _try_out(vocabulary, spec, matcher)
    estimate = _BASE_BYTES + _BYTES_PER_TEXT_BYTE * len(source.text)
    return Grammar(
        grammar_id=grammar_id,
        start=matcher,
        source=_with_warnings(source, matcher),
        num_bytes=max(estimate, allocated_bytes() - held_bytes),
        compile_ms=(ended_s - started_s) * 1000,
        load_ms=(ended_s - loaded_s) * 1000,
        max_mask_ms=max(mask_ms),
    )


def _with_warnings(source: Source, matcher: LLMatcher) -> Source:
    """What the engine itself let go, under `lenient`, is told too."""
    told = [" ".join(warning.split())[:200] for warning in matcher.get_grammar_warnings()]
    return replace(source, widened=(*source.widened, *told)) if told else source


def load_grammar(vocabulary: Vocabulary, engine_text: str) -> LLMatcher:
    """A matcher for the engine's own form of a grammar. Its faults are in `get_error`."""
    return LLMatcher(vocabulary.tokenizer, engine_text, log_level=0, limits=engine_limits())


def _try_out(vocabulary: Vocabulary, spec: GrammarSpec, start: LLMatcher) -> list[float]:
    """Milliseconds of each mask of a walk; a grammar too wide to be followed shows itself."""
    trial, times_ms = start.deep_copy(), []
    for step in range(_TRIAL_TOKENS):
        token_id = _allowed_token(vocabulary.bitmask(trial), step, vocabulary.eos_ids)
        if token_id is None:
            break
        trial.consume_token(token_id)
        times_ms.append(_timed_mask(vocabulary, trial))
        _check(spec, trial)
    return times_ms


def _timed_mask(vocabulary: Vocabulary, matcher: LLMatcher) -> float:
    started_s = time.process_time()
    vocabulary.bitmask(matcher)
    return (time.process_time() - started_s) * 1000


def _allowed_token(bitmask: bytes, step: int, eos_ids: Sequence[int]) -> int | None:
    """The lowest token that may come (the highest at odd steps) and does not end the text."""
    allowed = int.from_bytes(bitmask, "little")
    for token_id in eos_ids:
        allowed &= ~(1 << token_id)
    if not allowed:
        return None
    return allowed.bit_length() - 1 if step % 2 else (allowed & -allowed).bit_length() - 1


def _check(spec: GrammarSpec, matcher: LLMatcher) -> None:
    """Raise `InvalidRequest` for a grammar that the engine refuses, or serves only nearly."""
    problem = matcher.get_error()
    if not problem and is_exact(spec):
        problem = "; ".join(matcher.get_grammar_warnings())
    if problem:
        told, construct = readable(spec, problem)
        raise InvalidRequest(
            f"the {spec.kind} cannot be used: {told}",
            param=param_of(spec.kind),
            reason=construct,
        )
