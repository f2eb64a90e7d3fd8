"""Merges as one rank a token, where that is the same thing; checked for each vocabulary.

A merge table says which two tokens become one, and in which order. An encoder by ranks joins any
two neighbours whose joined bytes are a token, the lowest rank first. The two give the same ids if
every token, spelled out and merged by the table, comes out as that one token. For: let both be in
the same state (a text as tokens), and let x, y be neighbours whose joined bytes are a token t. No
merge has crossed the ends of x + y, so the merges inside it were those of t spelled out alone, and
x, y is a state of that too. A token that ends as itself passes one state of two tokens only, the
one that its own merge joins. So x, y is that pair; both encoders see the same candidates in the
same order, take the leftmost of the lowest rank, and are in the same state again.

Tokens that do not come out as themselves never occur in an answer of the table, and get no rank.
With `ignore_merges` (Llama 3) a piece that is such a token as a whole does become it. As an entry
of the last ranks it then may not ever be joined of two: it must end in three tokens or more.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import models

from finback.shared.codec.byte_alphabet import BYTE_OF

IdArray = npt.NDArray[np.int32]
NO_TOKEN: Final = -1
_TO_LATIN1: Final = {ord(char): value for char, value in BYTE_OF.items()}
_BATCH: Final = 256


@dataclass(frozen=True, slots=True)
class ByteRanks:
    """`ranks`: bytes of a token to its rank; `token_ids` [num_ranks]: ids, -1 for a missing byte."""

    ranks: dict[bytes, int]
    token_ids: IdArray


def ranks_of(
    vocab: Mapping[str, int], made: Iterable[str], model: models.BPE, *, ignore_merges: bool
) -> ByteRanks | None:
    """The ranks of a byte-level vocabulary; None where ranks would not say what its merges say.

    `made`: the token that each merge makes, in rank order. `model` has the same merges, and does
    not ignore them.
    """
    ordered = _in_order(made)
    if ordered is None:
        return None
    probe = tokenizers.Tokenizer(model)
    lengths = _merged_lengths(probe, ordered)
    reached = [token for token, length in zip(ordered, lengths, strict=True) if length == 1]
    if ignore_merges:
        known = set(reached)
        whole = [t for t in vocab if len(t) > 1 and t not in known and _is_spelled(t)]
        if any(length == 2 for length in _merged_lengths(probe, whole)):
            return None
        reached += whole
    return _numbered(reached, vocab)


def _in_order(made: Iterable[str]) -> list[str] | None:
    """Each token once; None if merges of one token stand apart."""
    ordered: list[str] = []
    for token in made:
        if not ordered or ordered[-1] != token:
            ordered.append(token)
    return ordered if len(set(ordered)) == len(ordered) else None


def _merged_lengths(probe: tokenizers.Tokenizer, spellings: Sequence[str]) -> list[int]:
    """How many tokens each spelling is after all merges."""
    lengths: list[int] = []
    for start in range(0, len(spellings), _BATCH):
        batch = list(spellings[start : start + _BATCH])
        found = probe.encode_batch_fast(batch, add_special_tokens=False)
        lengths.extend(map(len, found))
    return lengths


def _is_spelled(token: str) -> bool:
    return all(char in BYTE_OF for char in token)


def _numbered(tokens: Sequence[str], vocab: Mapping[str, int]) -> ByteRanks:
    """Bytes first: they are never the result of a merge, so their ranks do not matter."""
    ranks = {bytes([value]): value for value in range(256)}
    ids = [NO_TOKEN] * 256
    for char, value in BYTE_OF.items():
        ids[value] = vocab.get(char, NO_TOKEN)
    for token in tokens:
        ranks[token.translate(_TO_LATIN1).encode("latin-1")] = len(ids)
        ids.append(vocab[token])
    return ByteRanks(ranks, np.asarray(ids, dtype=np.int32))
