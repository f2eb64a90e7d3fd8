"""A model without a tokenizer: ids pass, text is refused."""

from pathlib import Path

import pytest

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.fork_server import warm_up
from finback.services.sampler.model_vocabulary import engine_tokenizer, read_table
from finback.shared.codec.load import load_codec, load_tokenizer
from finback.shared.errors import ConfigError, InvalidRequest
from finback.shared.models.hf_source import read_text
from finback.shared.models.text_files import TextFiles


def text_of(folder: Path, **files: str) -> TextFiles:
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    for name, data in files.items():
        (folder / f"{name}.json").write_text(data)
    return read_text(folder, 40)


def test_ids_pass_and_text_is_refused(tmp_path: Path) -> None:
    codec = load_codec(text_of(tmp_path), architecture="deepseek_v4")
    tokenizer = codec.tokenizer
    assert (codec.prompt, codec.output.name, tokenizer.has_text) == (None, "plain", False)
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((3,), 40)
    assert (tokenizer.token_bytes(7), tokenizer.decode([7, 8])) == (b"", "")
    assert tokenizer.spelling(7) == "<token 7>"
    for encode in (tokenizer.encode, tokenizer.encode_prompt):
        with pytest.raises(InvalidRequest, match="no tokenizer: give the prompt as token ids"):
            encode("")


def test_an_incomplete_folder_is_not_one_without_a_tokenizer(tmp_path: Path) -> None:
    text = text_of(tmp_path, tokenizer_config="{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json: missing"):
        load_tokenizer(text)


def test_the_sampler_starts_all_the_same(tmp_path: Path) -> None:
    text = text_of(tmp_path)
    table = read_table(text)
    made = engine_tokenizer(table, 40, lambda: load_tokenizer(text))
    warm_up(Vocabulary(made, 40, tuple(table.eos_ids)))
