"""What lies ahead along a grammar: forced, or guessed and allowed; the masks of a fresh matcher."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.look_ahead import look_ahead
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.wire.messages.generate import GrammarSpec


def start_of(vocabulary: Vocabulary, pattern: str) -> LLMatcher:
    return compile_grammar(vocabulary, GrammarSpec(kind="regex", text=pattern), "").start


def test_forced_tokens_are_told_up_to_a_choice(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    matcher = start_of(vocabulary, "the name of the (dog|cat) is good").deep_copy()
    before = vocabulary.bitmask(matcher)
    ahead = look_ahead(vocabulary, matcher, before, b"", 16)
    text = b"".join(tokenizer.token_bytes(token_id) for token_id in ahead.token_ids)
    assert len(ahead.token_ids) > 2
    assert b"the name of the ".startswith(text)
    assert len(ahead.masks) == len(ahead.token_ids)
    assert vocabulary.bitmask(matcher) == before
    assert not ahead.is_lost


def test_no_token_that_ends_is_told(vocabulary: Vocabulary) -> None:
    matcher = start_of(vocabulary, "abc").deep_copy()
    ahead = look_ahead(vocabulary, matcher, vocabulary.bitmask(matcher), b"", 16)
    assert ahead.token_ids and not set(ahead.token_ids) & set(vocabulary.eos_ids)
    assert vocabulary.bitmask(matcher) == vocabulary.bitmask(start_of(vocabulary, "abc"))


@settings(max_examples=40, deadline=None)
@given(
    text=st.text("abcdz", min_size=1, max_size=9),
    most=st.integers(0, 12),
    wild=st.lists(st.integers(-5, 10**6), max_size=2),
)
def test_a_guess_is_cut_where_the_grammar_refuses_it(
    text: str, most: int, wild: list[int], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    start = start_of(vocabulary, "[a-c]{2,5}d[ab]*")
    guess = [tokenizer.encode(letter)[0] for letter in text] + wild
    matcher = start.deep_copy()
    mask = vocabulary.bitmask(matcher)
    ahead = look_ahead(vocabulary, matcher, mask, np.array(guess, "<i4").tobytes(), most)
    assert len(ahead.token_ids) <= most
    expected, fresh = list[int](), start.deep_copy()
    for token_id, told in zip(ahead.token_ids, ahead.masks, strict=True):
        assert vocabulary.bitmask(fresh)[token_id >> 3] >> (token_id & 7) & 1
        expected.append(token_id)
        assert fresh.consume_token(token_id)
        assert told == vocabulary.bitmask(fresh)
    assert not ahead.is_lost
    assert vocabulary.bitmask(matcher) == mask
