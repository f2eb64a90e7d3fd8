"""Text to ids by ranks: several times faster than by merges, on any number of threads, same ids.

It is used where `byte_ranks.py` proved the vocabulary and `fast_patterns.py` knows the pattern.
What is left to the library that defines the ids: text with characters that the two libraries file
differently, with bytes that the vocabulary lacks, or on which the regular expression gives up.
"""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Final

import numpy as np
import tiktoken

from finback.shared.codec.byte_ranks import NO_TOKEN, ByteRanks, IdArray
from finback.shared.codec.fast_patterns import FastPattern
from finback.shared.codec.safe_cuts import safe_pieces

# A thread gets at least this much at once; less is not worth waking it.
_SHARE_CHARS: Final = 16_000
_MAX_THREADS: Final = 8
# The library looks for special tokens in all text; this one is fast to look for and never taken.
_NEVER: Final = "\U0010fffd<never>\U0010fffd"
# Composed already: a text of these alone is its own NFC form.
_MAY_CHANGE: Final = re.compile(
    "[^\x00-\u02ff\u2010-\u2027\u3001-\u3020\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uff01-\uff5e]"
)

EncodeExactly = Callable[[str], IdArray]


class FastEncoder:
    """Encodes plain text. Thread-safe; the work is done without the interpreter's lock."""

    def __init__(
        self,
        ranks: ByteRanks,
        pattern: FastPattern,
        *,
        normalize: Callable[[str], str] | None,
        exactly: EncodeExactly,
    ) -> None:
        """Uses `ranks` up. `exactly`: encodes by the library that defines the ids."""
        self._encoding = tiktoken.Encoding(
            "finback",
            pat_str=pattern.pattern,
            mergeable_ranks=ranks.ranks,
            special_tokens={_NEVER: len(ranks.token_ids)},
        )
        ranks.ranks.clear()  # the library has its own copy, and keeps this one too
        self._token_ids = ranks.token_ids
        self._lacks_bytes = bool((ranks.token_ids == NO_TOKEN).any())
        self._unsettled = re.compile(f"[{pattern.unsettled}]") if pattern.unsettled else None
        self._normalize = normalize
        self._exactly = exactly

    def encode(self, text: str) -> IdArray:
        """The ids of one text, on this thread."""
        if not text.isascii():
            if self._unsettled is not None and self._unsettled.search(text):
                return self._exactly(text)
            if self._normalize is not None and _MAY_CHANGE.search(text):
                text = self._normalize(text)
        try:
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # more steps than the regular expression may take
            return self._exactly(text)
        ids = self._token_ids[ranks]
        if self._lacks_bytes and (ids == NO_TOKEN).any():
            return self._exactly(text)
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[IdArray]:
        """The ids of each text; long ones are cut, and all of it is spread over the cores."""
        num_chars = sum(map(len, texts))
        if num_chars < 2 * _SHARE_CHARS or num_threads() == 1:
            return [self.encode(text) for text in texts]
        pieces = [safe_pieces(text, _SHARE_CHARS) or [""] for text in texts]
        done = iter(_in_shares(self.encode, [piece for cut in pieces for piece in cut]))
        return [joined([next(done) for _ in cut]) for cut in pieces]


def _in_shares(encode: EncodeExactly, pieces: Sequence[str]) -> list[IdArray]:
    """Runs of pieces, a share each, so that many short ones do not cost a hand-over each."""
    shares: list[list[str]] = [[]]
    num_chars = 0
    for piece in pieces:
        if num_chars >= _SHARE_CHARS:
            shares.append([])
            num_chars = 0
        shares[-1].append(piece)
        num_chars += len(piece)
    found = _threads().map(lambda share: list(map(encode, share)), shares)
    return [ids for share in found for ids in share]


def joined(parts: Sequence[IdArray]) -> IdArray:
    """Arrays of ids, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


@cache
def num_threads() -> int:
    """How many threads encode: one a core that this process may use, to a bound."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads(), thread_name_prefix="encode")
