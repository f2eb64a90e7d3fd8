"""The fast encoder gives the ids of the library that defines them, for every family and text."""

import random
import sys
import unicodedata
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.shared.codec import fast_encoder
from finback.shared.codec.fast_path import FastPath
from finback.shared.codec.safe_cuts import safe_pieces
from finback.shared.codec.tokenizer import Tokenizer
from support.pair_vocabulary import FAMILIES, pair_tokenizer

# Blanks of all kinds, digits of several scripts, contractions, marks, kana with and without
# marks, unassigned kana, control and format characters, emoji sequences, letters that fold oddly.
ALPHABET: Final = (
    " \t\n\r  'sStdreLLVEm09\u0663\u4e94\xe9<|_.,!?-+*/\\\xa0\u3000\u200d\U0001f44d\U0001f3fde\u0301"
    "aBcZ\x85\x00\u2028\u3042\u30a2\u30fb\u309b\u3099\u9fa5\u9fa6\u1680\xbd\u2167\xb2\u017fK\u212a"
    '\ufe0f\u0600\u01c5\u3040\u3097\u3098\u3007\x01\x01\x1c\u0130\uac00\u1100\u1161\uff0c\u3002"'
)
TEXTS: Final = st.one_of(
    st.text(st.sampled_from(ALPHABET), max_size=60),
    st.text(max_size=30),
    st.builds(lambda char, count: char * count, st.sampled_from(ALPHABET), st.integers(1, 300)),
)


@pytest.fixture(scope="module", params=FAMILIES)
def pairs(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = pair_tokenizer(request.param)
    assert tokenizer.prepare()
    return tokenizer


def assert_equal(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer._encode_whole(text).tolist(), ascii(text)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_ids_are_equal(pairs: Tokenizer, text: str) -> None:
    assert_equal(pairs, text)


def test_ids_are_equal_for_every_character(pairs: Tokenizer) -> None:
    """Each in five neighbourhoods; of large blocks of one kind, some."""
    known = [chr(value) for value in range(1, sys.maxunicode) if _is_tried(value)]
    assert len(known) > 20_000
    for start in range(0, len(known), 40):
        parts = [f"1{c}1a{c}a.{c}. {c} {c}\n{c}{c}\u30a2{c}" for c in known[start : start + 40]]
        assert_equal(pairs, "".join(parts))


def _is_tried(value: int) -> bool:
    kind = unicodedata.category(chr(value))
    is_large = 0x3400 <= value < 0xD7B0 or value >= 0x17000
    return kind not in ("Cs", "Co", "Cn") and (not is_large or value % 31 == 0 or kind != "Lo")


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 20))
def test_cuts_change_nothing(pairs: Tokenizer, text: str, size: int) -> None:
    pieces = safe_pieces(text, size)
    assert "".join(pieces) == text
    whole = pairs._encode_whole(text).tolist()
    assert [i for piece in pieces for i in pairs._encode_whole(piece).tolist()] == whole


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_the_real_vocabulary_gives_equal_ids(smollm: Tokenizer, text: str) -> None:
    assert smollm.prepare()
    assert_equal(smollm, text)


def test_a_long_text_on_several_threads(smollm: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm.prepare()
    monkeypatch.setattr(fast_encoder, "num_threads", lambda: 4)
    draw = random.Random(3)
    texts = ["".join(draw.choices(ALPHABET, k=draw.choice((0, 5, 4000)))) for _ in range(60)]
    texts.append("".join(draw.choices("ab \n\u4e2d\u6587\uff0c1", k=300_000)))
    found = smollm.encode_many(texts)
    assert [ids.tolist() for ids in found] == [smollm._encode_whole(t).tolist() for t in texts]


@pytest.mark.parametrize("text", [" " * 1_200_000 + "x", "\x01" * 300_000, "\u0663" * 200_000])
def test_what_the_expression_gives_up_on(text: str) -> None:
    tokenizer = pair_tokenizer("deepseek")
    assert tokenizer.prepare()
    assert_equal(tokenizer, text)


def test_bytes_that_the_vocabulary_lacks() -> None:
    tokenizer = pair_tokenizer("qwen2", missing=(0x01, 0xF0, 0x61))
    assert tokenizer.prepare()
    for text in ("b\x01c", "bab", "\U0001f44d", "bcd"):
        assert_equal(tokenizer, text)


def test_unpaired_surrogates_are_refused(pairs: Tokenizer) -> None:
    for encode in (pairs.encode, pairs._encode_whole):
        with pytest.raises((UnicodeEncodeError, TypeError)):
            encode("a\ud800b")


def test_a_long_text_starts_the_building() -> None:
    built: list[int] = []
    path = FastPath(lambda: built.append(1))
    assert path.encoder(10) is None
    assert not built
    assert path.encoder(10_000) is None
    assert not path.prepare()
    assert built == [1]


def test_characters_that_the_libraries_file_differently() -> None:
    tokenizer = pair_tokenizer("smollm")
    assert tokenizer.prepare()
    for char in "\U00011de0\U00011de9\U00016ff4\U00016ff6":
        assert_equal(tokenizer, f"a {char}  {char}1")
