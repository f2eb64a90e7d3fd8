"""The served model's vocabulary, read from its own files, as the grammar engine wants it.

The engine needs the bytes of every token and which tokens are control tokens. That is a fraction of
what a whole tokenizer holds in memory, so the one that a file may need to be read is dropped again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from finback.shared.codec import gguf_tokenizer
from finback.shared.codec.byte_alphabet import to_bytes
from finback.shared.codec.gguf_tokenizer import END_SPELLINGS
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError
from finback.shared.models.source import open_source
from finback.shared.models.text_files import GgufVocabulary, TextFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """`tokens[id]` in bytes (control tokens as they are spelled), ids that only control, the ends."""

    tokens: Sequence[bytes]
    control_ids: Sequence[int]
    eos_ids: Sequence[int]


def load_engine_tokenizer(model: str) -> tuple[LLTokenizer, int, tuple[int, ...]]:
    """The engine's tokenizer of `model`, the width of the logits, the end tokens.

    Raises `ConfigError`.
    """
    source = open_source(model)
    table = read_table(source.text)
    vocab_size = source.config.vocab_size
    made = engine_tokenizer(table, vocab_size, lambda: load_tokenizer(source.text))
    return made, vocab_size, tuple(table.eos_ids)


def read_table(text: TextFiles) -> TokenTable:
    """The tokens of an opened model."""
    if text.gguf is not None:
        return _from_gguf(text.gguf, text.eos_ids)
    return _from_tokenizer(load_tokenizer(text))


def engine_tokenizer(
    table: TokenTable, vocab_size: int, tokenizer: Callable[[], Tokenizer]
) -> LLTokenizer:
    """`tokenizer` is only made if the engine has text to encode, which masks do not need."""
    if len(table.tokens) > vocab_size:
        raise ConfigError(f"{len(table.tokens)} tokens, but {vocab_size} logits")
    wrapper = TokenizerWrapper(_Encoder(table, tokenizer))
    made = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(table.eos_ids))
    wrapper.tokens = []  # copied by now
    return made


class _Encoder:
    """What the engine's wrapper reads, by the names it expects."""

    def __init__(self, table: TokenTable, tokenizer: Callable[[], Tokenizer]) -> None:
        self.eos_token_id = table.eos_ids[0]
        self.bos_token_id = None
        self.tokens = table.tokens
        self.special_token_ids = table.control_ids
        self._make = tokenizer
        self._tokenizer: Tokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # how the wrapper finds out what it may pass
        if self._tokenizer is None:
            self._tokenizer = self._make()
        return self._tokenizer.encode(text)


def _from_gguf(vocabulary: GgufVocabulary, eos_ids: Sequence[int]) -> TokenTable:
    spellings = vocabulary.read_tokens()
    kinds = vocabulary.read_token_types().tolist()
    control_ids = [i for i, kind in enumerate(kinds) if kind == gguf_tokenizer.CONTROL]
    ends = [i for i in control_ids if spellings[i] in END_SPELLINGS]
    return TokenTable(
        tokens=[
            _plain_bytes(spelling) if kind == gguf_tokenizer.NORMAL else spelling.encode()
            for spelling, kind in zip(spellings, kinds, strict=True)
        ],
        control_ids=control_ids,
        eos_ids=list(dict.fromkeys([*eos_ids, *ends])),
    )


def _from_tokenizer(tokenizer: Tokenizer) -> TokenTable:
    ids = range(tokenizer.vocab_size)
    return TokenTable(
        tokens=[
            tokenizer.spelling(i).encode() if tokenizer.is_special(i) else tokenizer.token_bytes(i)
            for i in ids
        ],
        control_ids=[i for i in ids if tokenizer.is_special(i)],
        # Without a tokenizer no grammar is ever compiled, and a config may name no end.
        eos_ids=tokenizer.eos_ids or (() if tokenizer.has_text else (0,)),
    )


def _plain_bytes(spelling: str) -> bytes:
    try:
        return to_bytes(spelling)
    except KeyError:  # not in the byte alphabet: the file spells it literally
        return spelling.encode()
