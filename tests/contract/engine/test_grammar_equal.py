"""Constrained sequences give the same tokens and logprobs however they are run (deterministic mode).

The real grammar engine and the real walk of the sampler bring masks, at once or late, with what is forced
and with guesses cut by the grammar; hypothesis draws pools that are too small, guesses that are right
and wrong, samplers that forget. Compared with one token a step and no guess.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finback.services.decode.mask_book import MaskBook
from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.model_vocabulary import TokenTable, engine_tokenizer
from finback.services.sampler.sequences import Sequences
from finback.shared.engine.config import EngineConfig
from finback.shared.engine.output import StepOutput
from finback.shared.engine.sequence import SequenceKey, SequenceSpec
from finback.shared.wire.messages.generate import GrammarSpec, SamplingSpec
from finback.shared.wire.packed_masks import unpack_masks
from support.engine_driver import Completion, Driver
from support.tiny_model import CONFIG, tiny_stack

EOS = (0, 1, 2, 3)
TOKENS = [b"<0>", b"<1>", b"<2>", b"<3>", *(bytes([c]) for c in range(32, 127)), b'"a', b'": ']
SCHEMA = (
    '{"type": "object", "properties": {"first": {"enum": ["yes", "yet"]}, "second": {"type":'
    ' "integer", "minimum": 0, "maximum": 99}, "third": {"type": "string", "maxLength": 4}},'
    ' "required": ["first", "second", "third"], "additionalProperties": false}'
)
GRAMMARS = (
    GrammarSpec(kind="json_schema", text=SCHEMA, grammar_id="schema"),
    GrammarSpec(kind="regex", text="(abc|abd)+-[0-9]{2,4} the end", grammar_id="regex"),
    GrammarSpec(kind="choice", text='["Amsterdam", "Amstelveen", "Berlin"]', grammar_id="choice"),
    GrammarSpec(
        kind="lark", text='start: "if " NAME " then go"\nNAME: /[a-z]{1,5}/', grammar_id="lark"
    ),
)
BASE = EngineConfig(
    num_blocks=16,
    block_size=32,
    max_model_len=96,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_draft_tokens=0,
    max_span_tokens=0,
    eos_token_ids=EOS,
    mode="deterministic",
    num_threads=1,
    overlap_below_ms=0.0,
)


class _Letters:
    """Encodes what a grammar forces, a token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 28 for letter in text]


@lru_cache
def vocabulary() -> Vocabulary:
    table = TokenTable(tokens=TOKENS, control_ids=EOS, eos_ids=EOS)
    made = engine_tokenizer(table, CONFIG.vocab_size, _Letters)  # type: ignore[arg-type]  # all that is used of it
    return Vocabulary(made, CONFIG.vocab_size, EOS)


class Constrained(Driver):
    """A driver whose sequences follow grammars; `delay_s`: how long the sampler takes."""

    def __init__(
        self,
        config: EngineConfig,
        grammars: dict[SequenceKey, GrammarSpec],
        *,
        guesses: dict[SequenceKey, list[int]] | None = None,
        delay_s: float = 0.0,
        forgets_every: int = 10**9,
    ) -> None:
        super().__init__(tiny_stack(), config)
        self._grammars, self._guesses = grammars, guesses or {}
        self._delay_s, self._forgets_every = delay_s, forgets_every
        self._starts = {
            spec.grammar_id: compile_grammar(vocabulary(), spec, spec.grammar_id).start
            for spec in grammars.values()
        }
        self._sampler = Sequences(vocabulary())
        self._book = MaskBook()
        self._num_asked = 0
        self.broken: list[SequenceKey] = []
        for key, grammar in grammars.items():
            self._book.add(key, grammar)

    def _tokens_from(self, key: SequenceKey, position: int) -> bytes:
        return array("i", self.got[key].tokens[position:]).tobytes()

    def _on_step(self, output: StepOutput) -> None:
        super()._on_step(output)
        for key, position in output.want_masks:
            self._book.want(key, position)
        for key, position in output.want_drafts:
            start = position - self.specs[key].token_ids.size
            guess = array("i", self._guesses.get(key, [])[start : start + 9])
            self._book.guess(key, start, guess.tobytes())
        loop = asyncio.get_running_loop()
        loop.call_later(self._delay_s, self._answer) if self._delay_s else self._answer()

    def _answer(self) -> None:
        while rows := self._book.take_rows(self._tokens_from):
            self._num_asked += 1
            if self._num_asked % self._forgets_every == 0:
                self._sampler = Sequences(vocabulary())
            masks = [
                self._sampler.answer(
                    ("d", 1, row.request_id, row.choice), row, self._starts[row.grammar_id], 0.0
                )
                for row in rows
            ]
            answers = self._book.apply(rows, masks)
            for key, _ in answers.broken:
                self.engine.abort(key)
                self.broken.append(key)
            for mask in answers.masks:
                ids = np.frombuffer(mask.ahead_ids, dtype="<i4").astype(np.int32)
                ahead = unpack_masks(mask.ahead_masks, ids.size, len(mask.bitmask))
                self.engine.provide_mask(mask.key, mask.position, (mask.bitmask, *ahead), ids)


def _spec(index: int, seed: int, temperature: float, num_logprobs: int | None) -> SequenceSpec:
    sampling = SamplingSpec(temperature=temperature, max_tokens=60, num_logprobs=num_logprobs)
    return SequenceSpec(
        key=(f"r{index}", 0),
        attempt=1,
        token_ids=np.array([10 + index, 20, 30, 40 + seed % 40], dtype=np.int32),
        sampling=sampling,
        seed=seed,
        has_grammar=True,
        drafting=True,
    )


def _run(
    config: EngineConfig, specs: Sequence[SequenceSpec], grammars: Sequence[int], **more: object
) -> tuple[list[Completion], Constrained]:
    by_key = {spec.key: GRAMMARS[at] for spec, at in zip(specs, grammars, strict=True)}

    async def main() -> tuple[list[Completion], Constrained]:
        driver = Constrained(config, by_key, **more)  # type: ignore[arg-type]  # passed through
        async with driver:
            for spec in specs:
                driver.add(spec)
            await driver.until(
                lambda: bool(driver.broken) or all(driver.got[spec.key].end for spec in specs)
            )
            assert not driver.broken
            completions = [driver.got[spec.key] for spec in specs]
            driver.engine.check_integrity()
            return completions, driver

    return asyncio.run(main())


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    grammars=st.lists(st.integers(0, len(GRAMMARS) - 1), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 1.0]),
    num_logprobs=st.sampled_from([None, 2]),
    num_blocks=st.sampled_from([3, 4, 12]),
    span=st.sampled_from([1, 4, 8]),
    drafts=st.sampled_from([0, 3]),
    quality=st.sampled_from([2, 5, 1000]),
    overlap_below_ms=st.sampled_from([0.0, 1e9]),
    delay_s=st.sampled_from([0.0, 0.0, 0.008]),
    forgets_every=st.sampled_from([3, 10**9]),
)
def test_any_way_gives_the_tokens_and_logprobs_of_one_token_a_step(
    grammars: list[int],
    seed: int,
    temperature: float,
    num_logprobs: int | None,
    num_blocks: int,
    span: int,
    drafts: int,
    quality: int,
    overlap_below_ms: float,
    delay_s: float,
    forgets_every: int,
) -> None:
    specs = [_spec(i, seed + i, temperature, num_logprobs) for i in range(len(grammars))]
    expected, _ = _run(BASE, specs, grammars)
    guesses = {
        spec.key: [t if i % quality else (t + 1) % 99 for i, t in enumerate(one.tokens)]
        for spec, one in zip(specs, expected, strict=True)
    }
    config = replace(
        BASE,
        num_blocks=num_blocks,
        max_draft_tokens=drafts,
        max_span_tokens=span,
        overlap_below_ms=overlap_below_ms,
    )
    got, _ = _run(
        config, specs, grammars, guesses=guesses, delay_s=delay_s, forgets_every=forgets_every
    )
    for one, other in zip(expected, got, strict=True):
        assert other.tokens == one.tokens
        assert other.logprobs == one.logprobs
        assert one.end is not None
        assert other.end is not None
        assert other.end.finish_reason == one.end.finish_reason


@pytest.mark.parametrize("overlap_below_ms", [0.0, 1e9])
def test_forced_tokens_share_steps_and_are_counted(overlap_below_ms: float) -> None:
    specs = [_spec(0, 5, 0.0, 1)]
    (alone,), _ = _run(BASE, specs, [0])
    config = replace(BASE, max_span_tokens=8, overlap_below_ms=overlap_below_ms)
    (jumped,), _ = _run(config, specs, [0])
    assert jumped.tokens == alone.tokens
    assert jumped.end is not None
    # How soon a mask comes decides how many tokens share a step, so no more than this is certain.
    assert jumped.end.num_steps == len(jumped.tokens) - jumped.end.num_accepted_tokens
    assert jumped.end.num_completion_tokens == len(jumped.tokens)
    assert jumped.end.num_accepted_tokens == jumped.end.num_draft_tokens > 8
    assert jumped.logprobs == alone.logprobs  # of the raw distribution, as always
