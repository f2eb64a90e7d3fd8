"""When the fast encoder of a vocabulary is built: at the first long text, beside the work.

Until it is there, and for vocabularies that have none, the slower library encodes: the ids are the
same. So a start costs nothing, and a process that only sees short texts never pays for it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import tokenizers
from tokenizers import models

from finback.shared.codec.byte_ranks import IdArray, ranks_of
from finback.shared.codec.fast_encoder import FastEncoder
from finback.shared.codec.fast_patterns import normal_form, pattern_of

# The first text of this length starts the building.
LONG_CHARS: Final = 4_000
# What the built encoder must encode like the library before it is used.
_SAMPLE: Final = (
    "Don't WE'LL 1234567 x=3.14;\r\n\r\n\tif (a  <  b) {   return 'ok';}\n\n"
    "中文字符\uff0c混排English词。かな・カナ 한국어 Ünïcödé e\u0301 👍🏽👩‍👩‍👧 ٣५½ \u3000\xa0 end   \n  "
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Text tokens with their ids, and the merges in rank order.

    `ignore_merges`: a piece that is a token as a whole becomes it, merges or not.
    """

    tokens: dict[str, int]
    merges: Sequence[tuple[str, str]] | Sequence[list[str]] | Sequence[str]
    ignore_merges: bool = False

    def made(self) -> Iterator[str]:
        """The token that each merge makes; in a spelling there is no blank."""
        return (m.replace(" ", "") if isinstance(m, str) else "".join(m) for m in self.merges)

    def pairs(self) -> list[tuple[str, str]]:
        """What each merge joins."""
        return [_pair(merge) for merge in self.merges]


def _pair(merge: Sequence[str]) -> tuple[str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


class FastPath:
    """The fast encoder of one tokenizer, once there is one. Thread-safe."""

    def __init__(self, build: Callable[[], FastEncoder | None]) -> None:
        self._build = build
        self._encoder: FastEncoder | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_done = False

    def encoder(self, num_chars: int) -> FastEncoder | None:
        """What can encode now; a long text starts the building."""
        if not self._is_done and num_chars >= LONG_CHARS:
            self._start()
        return self._encoder

    def prepare(self) -> bool:
        """Build now, and wait for it. Is there a fast encoder."""
        if not self._is_done:
            self._start().join()
        return self._encoder is not None

    def _start(self) -> threading.Thread:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fast-path", daemon=True)
                self._thread.start()
            return self._thread

    def _run(self) -> None:
        try:
            self._encoder = self._build()
        finally:
            self._is_done = True


def build_encoder(
    plain: tokenizers.Tokenizer,
    read_vocabulary: Callable[[], Vocabulary | None],
    exactly: Callable[[str], IdArray],
) -> FastEncoder | None:
    """The fast encoder of a tokenizer; None where equal ids are not proved.

    `read_vocabulary` tells what `plain` was made of; None: more than merges decide its ids.
    """
    pattern, form = pattern_of(plain), normal_form(plain)
    if pattern is None or form is None:
        return None
    vocabulary = read_vocabulary()
    if vocabulary is None:
        return None
    model = plain.model
    if vocabulary.ignore_merges:
        model = models.BPE(vocab=vocabulary.tokens, merges=vocabulary.pairs())
    ranks = ranks_of(
        vocabulary.tokens, vocabulary.made(), model, ignore_merges=vocabulary.ignore_merges
    )
    if ranks is None:
        return None
    normalize = plain.normalizer.normalize_str if form and plain.normalizer is not None else None
    encoder = FastEncoder(ranks, pattern, normalize=normalize, exactly=exactly)
    is_equal = encoder.encode(_SAMPLE).tolist() == exactly(_SAMPLE).tolist()
    return encoder if is_equal else None
