"""The engine's vocabulary from both kinds of model files, and with logits wider than the tokens."""

import json

import pytest
from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary, compile_grammar
from finback.services.sampler.model_vocabulary import engine_tokenizer, read_table
from finback.shared.codec.byte_alphabet import CHAR_OF
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError
from finback.shared.models.source import open_source
from finback.shared.models.text_files import HfTokenizerFiles, TextFiles
from finback.shared.wire.messages.generate import GrammarSpec

END = 258


def hf_files() -> TextFiles:
    """256 bytes, "ab", a control token, an end token, a token that is text."""
    vocab = {CHAR_OF[value]: value for value in range(256)} | {"ab": 256}
    added = [
        {"id": 257, "content": "<|im_start|>", "special": True},
        {"id": END, "content": "<|im_end|>", "special": True},
        {"id": 259, "content": "<tool>", "special": False},
    ]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, **flags} for token in added],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"], "byte_fallback": False},
    }
    return TextFiles(
        kind="hf",
        vocab_size=320,
        bos_id=None,
        eos_ids=(END,),
        pad_id=None,
        chat_templates={},
        hf=HfTokenizerFiles(read_tokenizer_json=lambda: json.dumps(tokenizer), tokenizer_config={}),
    )


def open_vocabulary(files: TextFiles, vocab_size: int) -> Vocabulary:
    table = read_table(files)
    made = engine_tokenizer(table, vocab_size, lambda: load_tokenizer(files))
    return Vocabulary(made, vocab_size, tuple(table.eos_ids))


def allowed(vocabulary: Vocabulary, matcher: LLMatcher) -> list[int]:
    mask = vocabulary.bitmask(matcher)
    return [i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1]


def test_a_hugging_face_tokenizer_with_padded_logits() -> None:
    vocabulary = open_vocabulary(hf_files(), 301)
    assert vocabulary.bitmask_bytes == 40
    spec = GrammarSpec(kind="regex", text="ab|<tool>|<\\|im_start\\|>")
    matcher = compile_grammar(vocabulary, spec, "").start.deep_copy()
    assert len(vocabulary.bitmask(matcher)) == vocabulary.bitmask_bytes
    assert allowed(vocabulary, matcher) == sorted([ord("a"), 256, ord("<"), 259])
    assert matcher.consume_token(256)
    assert allowed(vocabulary, matcher) == [END]


def test_more_tokens_than_logits_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="260 tokens, but 200 logits"):
        open_vocabulary(hf_files(), 200)


def test_the_table_of_the_embedded_model_spells_what_the_tokenizer_says(
    tokenizer: Tokenizer,
) -> None:
    table = read_table(open_source("embedded").text)
    assert len(table.tokens) == tokenizer.vocab_size
    assert tuple(table.eos_ids) == tokenizer.eos_ids
    for token_id, spelled in enumerate(table.tokens):
        if tokenizer.is_special(token_id):
            assert token_id in table.control_ids
            assert spelled == tokenizer.spelling(token_id).encode()
        else:
            assert spelled == tokenizer.token_bytes(token_id)


def test_the_engine_can_encode_if_it_must(tokenizer: Tokenizer) -> None:
    text = "Hello, w\u00f6rld"
    files = open_source("embedded")
    made = engine_tokenizer(
        read_table(files.text), files.config.vocab_size, lambda: load_tokenizer(files.text)
    )
    assert made.tokenize_str(text) == tokenizer.encode(text)
