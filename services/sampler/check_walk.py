"""Walks along a grammar by its masks: random answers, and how far a text fits."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from finback.services.sampler.mask_desk import MaskDesk
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.errors import Unavailable
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask, MaskRequest, MaskRow

_MAX_TRIES: Final = 1000  # of 30 ms each at most
_CHUNK: Final = 64  # tokens of a text told at once
_MAX_SHOWN: Final = 24
# From so many tokens on, what ends things is preferred.
_TIRED_TOKENS: Final = 24
_CLOSING: Final = frozenset(b'"}])>')
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,-")


class WalkTokens:
    """The model's tokens by what they are good for in a random walk."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        count = min(vocab_size, tokenizer.vocab_size)
        spelled = [tokenizer.token_bytes(token_id) for token_id in range(count)]
        self.is_closing = _flags(
            vocab_size, (len(text) == 1 and text[0] in _CLOSING for text in spelled)
        )
        self.is_plain = _flags(vocab_size, (text and _PLAIN.issuperset(text) for text in spelled))
        self.first_bytes = [text[:1] for text in spelled]


def _flags(size: int, values: Any) -> npt.NDArray[np.bool_]:
    flags = np.zeros(size, dtype=bool)
    found = [bool(value) for value in values]
    flags[: len(found)] = found
    return flags


@dataclass(slots=True)
class Walk:
    """One grammar's sequences, asked for as decode asks."""

    masks: MaskDesk
    vocabulary: WalkTokens
    grammar_id: str
    spec: GrammarSpec
    _num_sequences: int = field(default=0)

    def open(self) -> "Told":
        """A sequence at the grammar's beginning."""
        self._num_sequences += 1
        return Told(self, f"s{self._num_sequences}")


class Told:
    """The tokens so far, of which the sampler knows the first `num_told`."""

    def __init__(self, drawing: Walk, name: str) -> None:
        self._drawing = drawing
        self._name = name
        self._num_told = 0
        self.token_ids: list[int] = []

    async def mask(self) -> Mask:
        """What may come next, or `error`. Raises `Unavailable`."""
        needs_grammar = False
        for _ in range(_MAX_TRIES):
            row = MaskRow(
                request_id=self._name,
                choice=0,
                grammar_id=self._drawing.grammar_id,
                position=self._num_told,
                token_ids=array("i", self.token_ids[self._num_told :]).tobytes(),
                grammar=self._drawing.spec if needs_grammar else None,
            )
            request = MaskRequest(instance="check", epoch=0, model="", rows=(row,))
            for mask in await self._drawing.masks.answer(request):
                if mask.need_grammar:
                    self._num_told, needs_grammar = 0, True
                elif mask.need_from is not None:
                    self._num_told = min(mask.need_from, len(self.token_ids))
                else:
                    self._num_told = 0 if mask.error else len(self.token_ids)
                    return mask
        raise Unavailable("the grammar's masks do not come", reason="no_mask")


def allowed_of(mask: Mask) -> npt.NDArray[np.int64]:
    """Ids of the tokens that may come."""
    bits = np.unpackbits(np.frombuffer(mask.bitmask, np.uint8), bitorder="little")
    return np.flatnonzero(bits)


async def draw(walk: Walk, *, seed: int, max_tokens: int) -> dict[str, Any]:
    """One random answer: {text, is_whole, num_tokens}; not whole if it became too long."""
    rng, sequence = random.Random(seed), walk.open()
    for _ in range(max_tokens):
        mask = await sequence.mask()
        if mask.error:
            return _drawn(walk, sequence, error=mask.error)
        token_id = choose(rng, walk.vocabulary, mask, len(sequence.token_ids))
        if token_id in walk.vocabulary.eos_ids:
            return _drawn(walk, sequence, is_whole=True)
        sequence.token_ids.append(token_id)
    is_whole = (await sequence.mask()).is_accepting
    return _drawn(walk, sequence, is_whole=is_whole)


def _drawn(
    walk: Walk, sequence: Told, *, is_whole: bool = False, error: str = ""
) -> dict[str, Any]:
    text = walk.vocabulary.tokenizer.decode(sequence.token_ids)
    told = {"text": text, "is_whole": is_whole, "num_tokens": len(sequence.token_ids)}
    return told | ({"error": error} if error else {})


def choose(rng: random.Random, vocabulary: WalkTokens, mask: Mask, num_tokens: int) -> int:
    """Mostly plain text, and the longer the answer the rather what ends it."""
    allowed = allowed_of(mask)
    eos = vocabulary.eos_ids
    patience = min(0.95, 0.35 + 0.6 * num_tokens / _TIRED_TOKENS)
    if mask.is_accepting and rng.random() < patience:
        return min(eos)
    allowed = allowed[~np.isin(allowed, list(eos))]
    if not allowed.size:
        return min(eos)
    kinds = [vocabulary.is_closing, vocabulary.is_plain]
    if rng.random() > patience:
        kinds.reverse()
    for kind in kinds:
        fitting = allowed[kind[allowed]]
        if fitting.size and rng.random() < 0.95:
            return int(fitting[rng.randrange(fitting.size)])
    return int(allowed[rng.randrange(allowed.size)])


async def judge(walk: Walk, text: str) -> dict[str, Any]:
    """Is a text a whole answer; if not, after how many characters it stops to fit, and what may follow.

    Tokens of single characters are told, so that it can stop between any two.
    """
    tokens, spelled = _by_character(walk.vocabulary.tokenizer, text)
    sequence, num_taken = walk.open(), 0
    mask = await sequence.mask()
    chunk = _CHUNK
    while num_taken < len(tokens):
        known = list(sequence.token_ids)
        chunk = min(chunk, len(tokens) - num_taken)
        for ids in tokens[num_taken : num_taken + chunk]:
            sequence.token_ids.extend(ids)
        found = await sequence.mask()
        if not found.error:
            mask, num_taken = found, num_taken + chunk
        elif chunk > 1:
            sequence.token_ids, chunk = known, chunk // 2
        else:
            return _judged(walk, text, num_taken, mask, is_spelled=True)
    is_spelled = spelled == len(text)
    is_whole = is_spelled and mask.is_accepting
    return {"is_whole": True} if is_whole else _judged(walk, text, num_taken, mask, is_spelled)


def _by_character(tokenizer: Tokenizer, text: str) -> tuple[list[list[int]], int]:
    """Tokens of each character, as far as the vocabulary can spell them, and how far that is."""
    known: dict[str, list[int]] = {}
    tokens: list[list[int]] = []
    for at, char in enumerate(text):
        if char not in known:
            ids = tokenizer.encode(char)
            if b"".join(map(tokenizer.token_bytes, ids)) != char.encode(errors="replace"):
                return tokens, at
            known[char] = ids
        tokens.append(known[char])
    return tokens, len(text)


def _judged(walk: Walk, text: str, num_taken: int, mask: Mask, is_spelled: bool) -> dict[str, Any]:
    line = text.count("\n", 0, num_taken) + 1
    return {
        "is_whole": False,
        "num_chars": num_taken,
        "line": line,
        "column": num_taken - (text.rfind("\n", 0, num_taken) + 1) + 1,
        "at_end": num_taken == len(text),
        "is_spelled": is_spelled,
        "next": _may_follow(walk.vocabulary, mask),
    }


def _may_follow(vocabulary: WalkTokens, mask: Mask) -> list[str]:
    """First characters of the tokens that may come; non-ASCII ones as one item."""
    count = len(vocabulary.first_bytes)
    firsts = {vocabulary.first_bytes[i] for i in allowed_of(mask).tolist() if i < count} - {b""}
    shown = sorted(first.decode() for first in firsts if first < b"\x80")
    if any(first >= b"\x80" for first in firsts):
        shown.append("non-ASCII")
    if mask.is_accepting:
        shown.insert(0, "the end")
    return shown if len(shown) <= _MAX_SHOWN else [*shown[:_MAX_SHOWN], f"{len(shown)} in all"]
