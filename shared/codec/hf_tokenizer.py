"""A tokenizer from Hugging Face's tokenizer.json, with its added tokens told apart from its text.

Two tokenizers come of one file: `full` as it stands, and `plain` with an empty list of added tokens
(the library's own switch for untrusted text leaves added tokens with `special: false` active).
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import tokenizers

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.fast_path import Vocabulary
from finback.shared.codec.gguf_tokenizer import END_SPELLINGS
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError

_ADDED_KEY: Final = '"added_tokens"'
_BEYOND_MERGES: Final = (
    "dropout",
    "byte_fallback",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)


def build(tokenizer_json: str, *, bos_id: int | None, eos_ids: Sequence[int]) -> Tokenizer:
    """`bos_id` and `eos_ids` come from the model's config; the file's template may add to them."""
    added, plain_json = _without_added(tokenizer_json)
    try:
        plain = tokenizers.Tokenizer.from_str(plain_json)
    except Exception as error:
        raise ConfigError(f"tokenizer.json cannot be used: {error}") from error
    _check_byte_level(plain)
    plain.no_truncation()
    plain.no_padding()
    prefix = plain.encode("").ids  # what the file's post-processor puts in front of any text
    control = [_control_token(entry) for entry in added]
    ends = [token.token_id for token in control if token.spelling in END_SPELLINGS]

    def load_full() -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(tokenizer_json)

    return Tokenizer(
        plain=plain,
        full=load_full,
        control=control,
        vocab_size=max([plain.get_vocab_size(), *(token.token_id + 1 for token in control)]),
        bos_id=prefix[0] if prefix else bos_id,
        eos_ids=tuple(dict.fromkeys([*eos_ids, *ends])),
        adds_bos=bool(prefix),
        read_vocabulary=lambda: _vocabulary(tokenizer_json),
    )


def _without_added(text: str) -> tuple[list[dict[str, Any]], str]:
    """The added tokens and the file without them; only that list is parsed, not the vocabulary."""
    position = text.find(_ADDED_KEY)
    if position < 0:
        raise ConfigError("tokenizer.json has no added_tokens; is it a Hugging Face tokenizer?")
    start = text.find("[", position)
    try:
        added, end = json.JSONDecoder().raw_decode(text, start)
        is_usable = all({"id", "content"} <= entry.keys() for entry in added)
    except (ValueError, AttributeError) as error:
        raise ConfigError("tokenizer.json: its added_tokens cannot be read") from error
    if not is_usable:
        raise ConfigError("tokenizer.json: an added token lacks its id or content")
    return added, f"{text[:start]}[]{text[end:]}"


def _vocabulary(text: str) -> Vocabulary | None:
    """None for a model that merges alone do not describe."""
    model = json.loads(text)["model"]
    if model.get("type") != "BPE" or any(model.get(field) for field in _BEYOND_MERGES):
        return None
    ignores = bool(model.get("ignore_merges", False))
    return Vocabulary(model["vocab"], model["merges"], ignore_merges=ignores)


def _control_token(entry: dict[str, Any]) -> ControlToken:
    return ControlToken(
        token_id=entry["id"],
        spelling=entry["content"],
        is_special=bool(entry.get("special", False)),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
    )


def _check_byte_level(tokenizer: tokenizers.Tokenizer) -> None:
    """Decoding by a table of bytes needs a byte-level vocabulary: 'Ġ' must be a blank in it."""
    if tokenizer.decoder is None or "ByteLevel" not in repr(tokenizer.decoder):
        raise ConfigError(
            "tokenizer.json is not a byte-level BPE; only byte-level vocabularies are supported"
        )
