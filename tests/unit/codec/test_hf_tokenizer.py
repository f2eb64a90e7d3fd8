"""A tokenizer.json: added tokens are told apart, text is text, long text is cut where proved."""

import json

import pytest
from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as HfTokenizer

from finback.shared.codec import hf_tokenizer
from finback.shared.codec.byte_alphabet import CHAR_OF
from finback.shared.codec.pre_tokenizers import by_name
from finback.shared.errors import ConfigError


def tokenizer_json(pre: str = "qwen2", *, bos: bool = False) -> str:
    from tokenizers import decoders

    vocab = {char: index for index, char in enumerate(CHAR_OF.values())}
    vocab |= {"he": 256, "ll": 257}
    tokenizer = HfTokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = by_name(pre).build()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", 258)]
        )
    return tokenizer.to_str()


def test_added_tokens_are_no_text() -> None:
    tokenizer = hf_tokenizer.build(tokenizer_json(), bos_id=None, eos_ids=(258,))
    ids = tokenizer.encode("hell<|end|><think>")
    assert ids[:2] == [256, 257]
    assert not {258, 259} & set(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"hell<|end|><think>"
    assert tokenizer.token_bytes(258) == b""
    assert tokenizer.token_bytes(259) == b"<think>"  # not special: it is shown
    assert tokenizer.vocab_size == 260


def test_control_tokens_enter_by_id() -> None:
    tokenizer = hf_tokenizer.build(tokenizer_json(), bos_id=None, eos_ids=(258,))
    pieces = list(tokenizer.control.split("he<think>ll<|end|>"))
    assert tokenizer.encode_pieces(pieces) == [256, 259, 257, 258]


def test_prefix_of_the_post_processor_is_the_bos() -> None:
    tokenizer = hf_tokenizer.build(tokenizer_json(bos=True), bos_id=None, eos_ids=())
    assert tokenizer.adds_bos
    assert tokenizer.encode_prompt("he") == [258, 256]
    assert tokenizer.encode("he") == [256]


@pytest.mark.parametrize(("pre", "is_safe"), [("qwen2", True), ("llama-bpe", True)])
def test_known_patterns_may_be_cut(pre: str, is_safe: bool) -> None:
    tokenizer = hf_tokenizer.build(tokenizer_json(pre), bos_id=None, eos_ids=())
    assert tokenizer.is_cuttable == is_safe


def test_an_unknown_pattern_is_not_cut() -> None:
    changed = tokenizer_json().replace("(?i:'s|", "(?i:'x|'s|")
    assert not hf_tokenizer.build(changed, bos_id=None, eos_ids=()).is_cuttable


def test_bad_files_are_refused() -> None:
    good = json.loads(tokenizer_json())
    for broken in ("{}", "no json", json.dumps({**good, "added_tokens": [{"id": 1}]})):
        with pytest.raises(ConfigError):
            hf_tokenizer.build(broken, bos_id=None, eos_ids=())
    with pytest.raises(ConfigError, match="byte-level"):
        hf_tokenizer.build(json.dumps({**good, "decoder": None}), bos_id=None, eos_ids=())
