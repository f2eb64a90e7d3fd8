"""The pre-tokenizers that a GGUF file names (`tokenizer.ggml.pre`) but does not hold.

A wrong one shows only in rare texts, so an unknown name stops the start instead of falling back.
The patterns are those of the models' own tokenizer files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from finback.shared.codec.fast_patterns import DIGIT_TRIPLES, SINGLE_DIGITS
from finback.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """What a name stands for. `adds_bos` is used where the file does not say."""

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizer: Callable[[], Normalizer] | None = None


def _byte_level() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_byte_level() -> PreTokenizer:
    # The digit step also cuts the blanks before a digit off, which byte-level alone would not do.
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _pattern(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


_LLAMA3: Final = PreTokenization(_pattern(DIGIT_TRIPLES), ignore_merges=True, adds_bos=True)
BY_NAME: Final[dict[str, PreTokenization]] = {
    "gpt-2": PreTokenization(_byte_level),
    "smollm": PreTokenization(_digits_then_byte_level),
    "qwen2": PreTokenization(_pattern(SINGLE_DIGITS), normalizer=normalizers.NFC),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


def by_name(name: str) -> PreTokenization:
    """The pre-tokenization of a GGUF file; an unknown name is a `ConfigError`."""
    found = BY_NAME.get(name)
    if found is None:
        known = ", ".join(sorted(BY_NAME))
        raise ConfigError(f"unknown pre-tokenizer {name!r} in the model file; known are: {known}")
    return found
