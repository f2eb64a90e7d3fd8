"""A tokenizer.json with one token a byte and the control tokens that a test asks for."""

import json
from collections.abc import Sequence

from finback.shared.codec.byte_alphabet import CHAR_OF
from finback.shared.models.text_files import HfTokenizerFiles, TextFiles


def byte_tokenizer_json(special: Sequence[str], plain: Sequence[str] = ()) -> str:
    """`special` control tokens and `plain` added tokens get the ids from 256 on, in order."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": 256 + index, "content": spelling, "special": index < len(special), **flags}
        for index, spelling in enumerate([*special, *plain])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {CHAR_OF[value]: value for value in range(256)},
            "merges": [],
            "byte_fallback": False,
        },
    }
    return json.dumps(tokenizer)


def text_files(tokenizer_json: str, templates: dict[str, str], end: int) -> TextFiles:
    """What a Hugging Face folder with this tokenizer and these templates says of text."""
    return TextFiles(
        kind="hf",
        vocab_size=320,
        bos_id=None,
        eos_ids=(end,),
        pad_id=None,
        chat_templates=templates,
        hf=HfTokenizerFiles(read_tokenizer_json=lambda: tokenizer_json, tokenizer_config={}),
    )
