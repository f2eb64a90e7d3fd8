"""The embedded model's tokenizer: against llama.cpp, against its own bytes, cut and uncut."""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.safe_cuts import safe_pieces
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError
from finback.shared.models.source import ModelSource

# Blanks of all kinds, digits of several scripts, contractions, control spellings, emoji, marks.
ALPHABET = " \t\n\r  'sStdreLL09٣五é<|im_start|>end_of.,!?-+*/\\\xa0\u3000\u200d👍🏽e\u0301aBcZ"
CONTROL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def adversarial(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(ALPHABET, k=draw.randint(1, 60))) for _ in range(count)]


def test_equals_llama_cpp(smollm: Tokenizer, smollm_source: ModelSource) -> None:
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason="llama-cpp-python is not installed; it is the reference here"
    )
    reference = llama_cpp.Llama(str(smollm_source.path), vocab_only=True, verbose=False)
    try:
        for text in adversarial(1500, seed=1):
            expected = reference.tokenize(text.encode(), add_bos=False, special=False)
            assert smollm.encode(text) == expected, repr(text)
    finally:
        reference.close()


@given(st.text(max_size=80))
def test_decodes_to_the_same_bytes(smollm: Tokenizer, text: str) -> None:
    # SmolLM2's vocabulary lacks some bytes (control characters, leads of unused planes).
    known = {smollm.token_bytes(token_id) for token_id in range(17, 17 + 256)}
    raw = text.encode()
    assume(all(bytes([value]) in known for value in raw))
    assert b"".join(map(smollm.token_bytes, smollm.encode(text))) == raw


@settings(max_examples=60)
@given(st.text(st.sampled_from(ALPHABET), max_size=200), st.integers(1, 20))
def test_safe_pieces_keep_the_tokens(smollm: Tokenizer, text: str, size: int) -> None:
    pieces = safe_pieces(text, size)
    assert "".join(pieces) == text
    whole = smollm.encode(text)  # short enough not to be cut
    assert [token for piece in pieces for token in smollm.encode(piece)] == whole


def test_long_text_is_cut_without_a_trace(smollm: Tokenizer) -> None:
    text = " ".join(adversarial(1500, seed=2))
    assert len(text) > 10_000
    uncut = smollm._encode_whole(text).tolist()
    assert smollm.encode(text) == uncut


@pytest.mark.parametrize("spelling", CONTROL)
def test_control_spellings_in_text_stay_text(smollm: Tokenizer, spelling: str) -> None:
    ids = smollm.encode(f"a{spelling}b")
    assert not any(smollm.is_special(token_id) for token_id in ids)
    assert b"".join(map(smollm.token_bytes, ids)).decode() == f"a{spelling}b"


def test_special_ids(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49_152
    assert smollm.eos_ids == (2, 0)
    assert [smollm.spelling(token_id) for token_id in smollm.eos_ids] == ["<|im_end|>", CONTROL[2]]
    assert smollm.token_bytes(2) == b""
    assert smollm.token_bytes(10**6) == b""
    assert not smollm.adds_bos


def test_json_form_knows_control_tokens(smollm: Tokenizer) -> None:
    from tokenizers import Tokenizer as HfTokenizer

    full = HfTokenizer.from_str(smollm.to_json())
    assert full.encode("<|im_start|>user\nhi", add_special_tokens=False).ids[0] == 1
    assert full.get_vocab_size() == smollm.vocab_size


@pytest.mark.parametrize("change", [{"pre": "no-such"}, {"model": "llama"}])
def test_unknown_tokenizers_are_refused(smollm_source: ModelSource, change: Any) -> None:
    gguf = smollm_source.text.gguf
    assert gguf is not None
    text = dataclasses.replace(smollm_source.text, gguf=dataclasses.replace(gguf, **change))
    with pytest.raises(ConfigError, match=r"no-such|llama"):
        load_tokenizer(text)
