"""Each known pre-tokenizer as one regular expression, for the encoder that splits in one pass.

A pre-tokenizer of several steps cuts the text step by step; here its steps are folded into one
pattern that gives the same cuts. Tests compare every pattern with the steps that it stands for,
over all code points and adversarial text; a pre-tokenizer that is not listed has no pattern.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SINGLE_DIGITS: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
DIGIT_TRIPLES: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"

GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits are cut off first, so blanks before one are a piece of their own.
SMOLLM: Final = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

# DeepSeek's three steps: triples of digits, runs of Han and kana, and what is left.
DEEPSEEK_STEPS: Final = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""  # noqa: ISC004 -- one step
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# Characters of the second step. The third cuts in and around its runs, never across their ends.
_HAN: Final = "\u4e00-\u9fa5\u3040-\u30ff"
_LETTERS: Final = r"[\p{L}\p{M}]"
_SYMBOLS: Final = r"[\p{P}\p{S}]"
_OTHERS: Final = r"\s\p{L}\p{M}\p{N}\p{P}\p{S}"
DEEPSEEK: Final = "|".join(
    (
        r"\p{N}{1,3}",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{_HAN}]?[{_LETTERS}--[{_HAN}]]+",
        rf" ?[{_SYMBOLS}--[{_HAN}]]+[\r\n]*",
        rf"[[{_HAN}]&&[^\p{{L}}\p{{P}}\p{{S}}]]?[{_LETTERS}&&[{_HAN}]]+",
        rf"[{_SYMBOLS}&&[{_HAN}]]+",
        r"\s*[\r\n]+",
        rf"\s+(?![^\s\p{{N}}{_HAN}])",
        r"\s+",
        # What no alternative of the third step takes stays one piece, up to where one begins.
        rf"[^{_OTHERS}{_HAN}]+(?![{_LETTERS}--[{_HAN}]])",
        rf"[[{_HAN}]&&[^{_OTHERS}]]+(?![{_LETTERS}&&[{_HAN}]])",
    )
)


@dataclass(frozen=True, slots=True)
class FastPattern:
    """`unsettled`: characters (as inside a class) that the two libraries file differently."""

    pattern: str
    unsettled: str = ""


# A step: ("Split", its pattern), ("Digits", one by one) or ("ByteLevel", with GPT-2's pattern).
_Steps = tuple[tuple[str, str | bool], ...]
_BYTES: Final = ("ByteLevel", False)
_KNOWN: Final[dict[_Steps, FastPattern]] = {
    (("ByteLevel", True),): FastPattern(GPT2),
    # Numbers of Unicode 17 that the digit step knows and the pattern does not.
    (("Digits", True), ("ByteLevel", True)): FastPattern(
        SMOLLM, "\U00011de0-\U00011de9\U00016ff4-\U00016ff6"
    ),
    (("Split", SINGLE_DIGITS), _BYTES): FastPattern(SINGLE_DIGITS),
    (("Split", DIGIT_TRIPLES), _BYTES): FastPattern(DIGIT_TRIPLES),
    (*(("Split", step) for step in DEEPSEEK_STEPS), _BYTES): FastPattern(DEEPSEEK),
}


def pattern_of(tokenizer: tokenizers.Tokenizer) -> FastPattern | None:
    """The pattern of a tokenizer's pre-tokenizer; None for one that is not known."""
    if tokenizer.pre_tokenizer is None:
        return None
    found = json.loads(tokenizer.pre_tokenizer.__getstate__())
    steps = [_step(step) for step in found.get("pretokenizers", [found])]
    known = tuple(step for step in steps if step is not None)
    return _KNOWN.get(known) if len(known) == len(steps) else None


def normal_form(tokenizer: tokenizers.Tokenizer) -> str | None:
    """ "" for a tokenizer that takes text as it is, "NFC", or None for any other normalizer."""
    if tokenizer.normalizer is None:
        return ""
    found = json.loads(tokenizer.normalizer.__getstate__())
    steps: Sequence[Any] = found.get("normalizers", [found])
    if not steps:
        return ""
    return "NFC" if [step.get("type") for step in steps] == ["NFC"] else None


def _step(step: dict[str, Any]) -> tuple[str, str | bool] | None:
    match step:
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return None if step.get("invert") else ("Split", pattern)
        case {"type": "Digits", "individual_digits": bool(single)}:
            return "Digits", single
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "ByteLevel", bool(step.get("use_regex", True))
    return None
