"""Sequence states: advanced, taken back, lost, rebuilt; always the mask of a fresh matcher."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.sequences import IDLE_S, SequenceKey, Sequences
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import MaskRow

KEY: SequenceKey = ("decode-a", 1, "r", 0)


@pytest.fixture(scope="module")
def grammar(vocabulary: Vocabulary) -> LLMatcher:
    spec = GrammarSpec(kind="regex", text="[a-c]{4,12}")
    return compile_grammar(vocabulary, spec, "").start


def row(position: int, token_ids: list[int], grammar_id: str = "") -> MaskRow:
    return MaskRow(
        request_id="r",
        choice=0,
        grammar_id=grammar_id,
        position=position,
        token_ids=np.array(token_ids, "<i4").tobytes(),
    )


def fresh(vocabulary: Vocabulary, grammar: LLMatcher, token_ids: list[int]) -> bytes:
    matcher = grammar.deep_copy()
    assert matcher.consume_tokens(token_ids)
    return vocabulary.bitmask(matcher)


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.encode(letter)[0] for letter in text]


def test_it_follows_tokens(
    vocabulary: Vocabulary, grammar: LLMatcher, tokenizer: Tokenizer
) -> None:
    sequences = Sequences(vocabulary)
    ids = letters(tokenizer, "abcabcabcabc")
    for position in range(len(ids)):
        new = [] if position == 0 else ids[position - 1 : position]
        mask = sequences.answer(KEY, row(max(0, position - 1), new), grammar, 0.0)
        assert (mask.position, mask.error, mask.need_from) == (position, "", None)
        assert mask.bitmask == fresh(vocabulary, grammar, ids[:position])
        assert mask.is_accepting == (position >= 4)


def test_what_is_lost_is_asked_for(
    vocabulary: Vocabulary, grammar: LLMatcher, tokenizer: Tokenizer
) -> None:
    sequences = Sequences(vocabulary)
    ids = letters(tokenizer, "abc")
    mask = sequences.answer(KEY, row(2, ids[2:]), None, 0.0)
    assert mask.need_grammar and mask.bitmask == b""
    mask = sequences.answer(KEY, row(2, ids[2:]), grammar, 0.0)
    assert mask.need_from == 0 and not mask.need_grammar and mask.bitmask == b""
    mask = sequences.answer(KEY, row(0, ids), None, 0.0)
    assert mask.bitmask == fresh(vocabulary, grammar, ids)
    mask = sequences.answer(KEY, row(5, ids), grammar, 0.0)
    assert mask.need_from == 3


@settings(max_examples=80, deadline=None)
@given(told=st.lists(st.tuples(st.integers(0, 8), st.text("abc", max_size=4)), max_size=8))
def test_any_telling_gives_the_mask_of_a_fresh_start(
    told: list[tuple[int, str]], vocabulary: Vocabulary, grammar: LLMatcher, tokenizer: Tokenizer
) -> None:
    sequences, known = Sequences(vocabulary), list[int]()
    for position, text in told:
        mask = sequences.answer(KEY, row(position, letters(tokenizer, text)), grammar, 0.0)
        if position > len(known):
            assert mask.need_from == len(known)
            continue
        known = known[:position] + letters(tokenizer, text)
        assert mask.position == len(known)
        assert mask.bitmask == fresh(vocabulary, grammar, known)


def test_tokens_that_do_not_fit_are_an_error_and_the_state_is_dropped(
    vocabulary: Vocabulary, grammar: LLMatcher, tokenizer: Tokenizer
) -> None:
    sequences = Sequences(vocabulary)
    ids = letters(tokenizer, "abz")
    assert sequences.answer(KEY, row(0, ids), grammar, 0.0).error
    assert len(sequences) == 0
    good = letters(tokenizer, "abc")
    assert sequences.answer(KEY, row(0, good), grammar, 0.0).bitmask


@pytest.mark.parametrize("ids", [[-1], [10**6], [49152]])
def test_impossible_ids_are_an_error(
    ids: list[int], vocabulary: Vocabulary, grammar: LLMatcher
) -> None:
    assert Sequences(vocabulary).answer(KEY, row(0, ids), grammar, 0.0).error
    odd = MaskRow(request_id="r", choice=0, grammar_id="", position=0, token_ids=b"abc")
    assert Sequences(vocabulary).answer(KEY, odd, grammar, 0.0).error
    assert Sequences(vocabulary).answer(KEY, row(-1, []), grammar, 0.0).error


def test_another_grammar_starts_anew(
    vocabulary: Vocabulary, grammar: LLMatcher, tokenizer: Tokenizer
) -> None:
    sequences = Sequences(vocabulary)
    sequences.answer(KEY, row(0, letters(tokenizer, "abc")), grammar, 0.0)
    mask = sequences.answer(KEY, row(3, [], grammar_id="other"), grammar, 0.0)
    assert mask.need_from == 0


def test_states_expire_and_are_bounded(vocabulary: Vocabulary, grammar: LLMatcher) -> None:
    sequences = Sequences(vocabulary, max_sequences=3)
    keys: list[SequenceKey] = [("decode-a", 1, "r", index) for index in range(5)]
    for index, key in enumerate(keys):
        sequences.answer(key, row(0, []), grammar, float(index))
    assert len(sequences) == 3
    assert sequences.expire(IDLE_S + 2.5) == 1
    sequences.end([*keys, *keys])
    assert len(sequences) == 0
