"""A vocabulary that shows every border of a pre-tokenizer: most pairs of bytes are a token.

A border at another place pairs the bytes another way, so equal ids mean equal borders.
"""

import json
import random
from collections.abc import Sequence
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from finback.shared.codec import hf_tokenizer
from finback.shared.codec import tokenizer as codec
from finback.shared.codec.byte_alphabet import CHAR_OF
from finback.shared.codec.fast_patterns import DEEPSEEK_STEPS
from finback.shared.codec.pre_tokenizers import by_name

NUM_PAIRS: Final = 24_000
FAMILIES: Final = ("gpt-2", "smollm", "qwen2", "llama3", "deepseek")


def pre_tokenizer(family: str) -> PreTokenizer:
    """The steps of a family's own tokenizer file."""
    if family != "deepseek":
        return by_name(family).build()
    splits = [pre_tokenizers.Split(Regex(step), "isolated") for step in DEEPSEEK_STEPS]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


def pair_tokenizer(family: str, *, missing: Sequence[int] = ()) -> codec.Tokenizer:
    """A tokenizer of all bytes but the missing ones, and of many pairs of them, seeded."""
    known = [char for value, char in CHAR_OF.items() if value not in missing]
    draw = random.Random(family)
    pairs = draw.sample([(left, right) for left in known for right in known], NUM_PAIRS)
    vocab = {char: index for index, char in enumerate(known)}
    vocab |= {left + right: len(known) + rank for rank, (left, right) in enumerate(pairs)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizer(family)
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    file = json.loads(tokenizer.to_str())
    return hf_tokenizer.build(json.dumps(file), bos_id=None, eos_ids=())
