"""Ranks say what merges say, or there are none: against a slow encoder by merges."""

import itertools
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models

from finback.shared.codec.byte_ranks import NO_TOKEN, ranks_of

LETTERS: Final = "abc"
TEXTS: Final = [
    "".join(chars) for size in range(1, 7) for chars in itertools.product(LETTERS, repeat=size)
]
Merges = list[tuple[str, str]]


def by_merges(text: str, merges: Merges) -> list[str]:
    """The first merge of the table that fits anywhere, leftmost, until none fits."""
    parts, rank = list(text), {pair: at for at, pair in enumerate(merges)}
    while True:
        pairs = [(rank[p], at) for at, p in enumerate(itertools.pairwise(parts)) if p in rank]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


def by_ranks(text: str, ranks: dict[bytes, int]) -> list[str]:
    """The lowest rank of two neighbours, leftmost, until none is known; whole words first."""
    parts = [text] if text.encode() in ranks else list(text)
    while True:
        pairs = [
            (ranks[joined], at)
            for at, pair in enumerate(itertools.pairwise(parts))
            if (joined := "".join(pair).encode()) in ranks
        ]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = ["".join(parts[at : at + 2])]


@st.composite
def tables(draw: st.DrawFn) -> Merges:
    """Merges of tokens that are there already, in any order of making: some are never reached."""
    tokens, merges = list(LETTERS), Merges()
    for _ in range(draw(st.integers(1, 7))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in merges and len("".join(pair)) <= 5:
            merges.append(pair)
            tokens.append("".join(pair))
    return merges


def vocab_of(merges: Merges) -> dict[str, int]:
    tokens = dict.fromkeys([*LETTERS, *("".join(pair) for pair in merges)])
    return {token: index for index, token in enumerate(reversed(tokens))}


@settings(max_examples=80, deadline=None)
@given(tables(), st.booleans())
def test_ranks_encode_like_merges(merges: Merges, ignore_merges: bool) -> None:
    vocab = vocab_of(merges)
    model = models.BPE(vocab=vocab, merges=merges)
    made = ["".join(pair) for pair in merges]
    found = ranks_of(vocab, made, model, ignore_merges=ignore_merges)
    if found is None:
        return
    for text in TEXTS:
        expected = [text] if ignore_merges and text in vocab else by_merges(text, merges)
        assert by_ranks(text, found.ranks) == expected, text
    for raw, rank in found.ranks.items():
        assert found.token_ids[rank] == vocab.get(raw.decode("latin-1"), NO_TOKEN)


def test_merges_of_one_token_that_stand_apart_have_no_ranks() -> None:
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "c"), ("a", "bc")]
    model = models.BPE(vocab=vocab_of(merges), merges=merges)
    made = ["".join(pair) for pair in merges]
    assert ranks_of(vocab_of(merges), made, model, ignore_merges=False) is None


def test_a_token_that_merges_never_make_has_no_rank() -> None:
    merges = [("a", "b"), ("b", "c"), ("a", "bc")]
    vocab = vocab_of(merges)
    model = models.BPE(vocab=vocab, merges=merges)
    made = ["".join(pair) for pair in merges]
    found = ranks_of(vocab, made, model, ignore_merges=False)
    assert found is not None
    assert b"abc" not in found.ranks
    # As a whole word it would be taken, but then "ab" and "c" would be joined everywhere.
    assert ranks_of(vocab, made, model, ignore_merges=True) is None
