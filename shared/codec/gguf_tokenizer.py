"""A byte-level BPE tokenizer from what a GGUF file holds: spellings, merges, types and a name."""

from collections.abc import Callable, Sequence
from typing import Final

import tokenizers
from tokenizers import AddedToken, decoders, models

from finback.shared.codec.control_tokens import ControlToken
from finback.shared.codec.fast_path import Vocabulary
from finback.shared.codec.pre_tokenizers import PreTokenization, by_name
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import ConfigError

# Values of `tokenizer.ggml.token_type`.
NORMAL: Final = 1
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5

# Control tokens that end an answer, whichever of them the file names as its end token.
END_SPELLINGS: Final = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"}
)


def build(
    *,
    read_tokens: Callable[[], list[str]],
    read_merges: Callable[[], list[str]],
    read_token_types: Callable[[], Sequence[int]],
    pre: str,
    bos_id: int | None,
    eos_ids: Sequence[int],
    adds_bos: bool | None,
) -> Tokenizer:
    """Index of a token = id; merges in rank order, two spellings and one space between.

    The lists are read when needed and not kept: they are several times as large as the tokenizer.
    """
    pre_tokenization = by_name(pre)
    tokens, token_types = read_tokens(), list(map(int, read_token_types()))
    if len(tokens) != len(token_types):
        raise ConfigError("the model file has not one token type for each token")
    control = [
        ControlToken(token_id=token_id, spelling=tokens[token_id], is_special=kind == CONTROL)
        for token_id, kind in enumerate(token_types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    plain = _plain(tokens, read_merges(), token_types, pre_tokenization)

    def full() -> tokenizers.Tokenizer:
        every = _plain(read_tokens(), read_merges(), None, pre_tokenization)
        return _with_control(every, control)

    def vocabulary() -> Vocabulary:
        texts = _texts(read_tokens(), list(map(int, read_token_types())))
        ignores = pre_tokenization.ignore_merges
        return Vocabulary(texts, read_merges(), ignore_merges=ignores)

    ends = [token.token_id for token in control if token.spelling in END_SPELLINGS]
    return Tokenizer(
        plain=plain,
        full=full,
        control=control,
        vocab_size=len(tokens),
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys([*eos_ids, *ends])),
        adds_bos=pre_tokenization.adds_bos if adds_bos is None else adds_bos,
        read_vocabulary=vocabulary,
    )


def _plain(
    tokens: Sequence[str],
    merges: Sequence[str],
    token_types: Sequence[int] | None,
    pre_tokenization: PreTokenization,
) -> tokenizers.Tokenizer:
    """Without control tokens where `token_types` is given, so that text can never become one."""
    vocab = _texts(tokens, token_types)
    num_expected = len(tokens) if token_types is None else token_types.count(NORMAL)
    if len(vocab) != num_expected:
        raise ConfigError("the model file's vocabulary holds one spelling twice")
    try:
        pairs = [_pair(merge) for merge in merges]
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre_tokenization.ignore_merges)
    except Exception as error:
        raise ConfigError(f"the model file's tokenizer is unusable: {error}") from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenization.build()
    if pre_tokenization.normalizer is not None:
        tokenizer.normalizer = pre_tokenization.normalizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _texts(tokens: Sequence[str], token_types: Sequence[int] | None) -> dict[str, int]:
    return {
        spelling: token_id
        for token_id, spelling in enumerate(tokens)
        if token_types is None or token_types[token_id] == NORMAL
    }


def _pair(merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not (left and separator and right):
        raise ValueError(f"not a merge: {merge!r}")
    return left, right


def _with_control(
    tokenizer: tokenizers.Tokenizer, control: Sequence[ControlToken]
) -> tokenizers.Tokenizer:
    size = tokenizer.get_vocab_size()
    for is_special in (True, False):
        added = [
            AddedToken(token.spelling, normalized=False, special=is_special)
            for token in control
            if token.is_special == is_special
        ]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != size:
        raise ConfigError("a control token of the model file is not in its vocabulary")
    return tokenizer
