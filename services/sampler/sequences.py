"""Where each constrained sequence stands in its grammar. Rebuilt from tokens at any time.

A caller tells the tokens it has from some position on; what is not known here is asked back
(`need_from`, `need_grammar`), so a restarted or another instance catches up in one exchange.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from llguidance import LLMatcher

from finback.services.sampler.compiler import Vocabulary
from finback.services.sampler.look_ahead import is_empty, look_ahead
from finback.shared.wire.messages.sampler import Mask, MaskRow
from finback.shared.wire.packed_masks import pack_masks

IDLE_S: Final = 120.0
MAX_SEQUENCES: Final = 4096

# caller's instance and epoch, request id, choice
SequenceKey = tuple[str, int, str, int]


@dataclass(slots=True)
class _Sequence:
    grammar_id: str
    matcher: LLMatcher
    used_s: float
    token_ids: list[int] = field(default_factory=list)


class Sequences:
    """The states, least recently used out first.

    Several threads may ask at once, but only one for the same key: a matcher is no shared thing.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_sequences: int = MAX_SEQUENCES) -> None:
        self._vocabulary = vocabulary
        self._max_sequences = max_sequences
        self._known: OrderedDict[SequenceKey, _Sequence] = OrderedDict()
        self._lock = threading.Lock()  # guards the table, not the states in it

    def __len__(self) -> int:
        return len(self._known)

    def answer(self, key: SequenceKey, row: MaskRow, start: LLMatcher | None, now_s: float) -> Mask:
        """Advance the row's sequence by its tokens and say what may come after them.

        `start` is the grammar's beginning. None: it is not at hand.
        """
        sequence = self._open(key, row, start, now_s)
        if sequence is None:
            return _mask(row, row.position, need_grammar=True)
        if row.position > len(sequence.token_ids):
            return _mask(row, row.position, need_from=len(sequence.token_ids))
        problem = _advance(sequence, row, self._vocabulary.vocab_size)
        if not problem:
            bitmask = self._vocabulary.bitmask(sequence.matcher)
            is_stuck = is_empty(bitmask)
            problem = sequence.matcher.get_error() or ("no token may follow" if is_stuck else "")
        if problem:
            self.end([key])
            return _mask(row, row.position, error=problem.splitlines()[0][:500])
        mask = _mask(
            row,
            len(sequence.token_ids),
            bitmask=bitmask,
            is_accepting=sequence.matcher.is_accepting(),
        )
        return self._with_ahead(mask, key, row, sequence) if row.max_ahead > 0 else mask

    def _with_ahead(self, mask: Mask, key: SequenceKey, row: MaskRow, sequence: _Sequence) -> Mask:
        """What is forced, or guessed and allowed, and the masks along it."""
        ahead = look_ahead(
            self._vocabulary, sequence.matcher, mask.bitmask, row.guess_ids, row.max_ahead
        )
        if ahead.is_lost:
            self.end([key])  # to be rebuilt from its tokens
        if not ahead.token_ids:
            return mask
        token_ids = array("i", ahead.token_ids).tobytes()
        return replace(mask, ahead_ids=token_ids, ahead_masks=pack_masks(ahead.masks))

    def end(self, keys: Iterable[SequenceKey]) -> None:
        """Forget sequences."""
        with self._lock:
            for key in keys:
                self._known.pop(key, None)

    def expire(self, now_s: float) -> int:
        """Forget what nobody asked for in two minutes; returns how many."""
        with self._lock:
            idle = [key for key, seq in self._known.items() if now_s - seq.used_s >= IDLE_S]
        self.end(idle)
        return len(idle)

    def _open(
        self, key: SequenceKey, row: MaskRow, start: LLMatcher | None, now_s: float
    ) -> _Sequence | None:
        """The state of `key`, a new one if need be; None if that needs a grammar that is not here."""
        with self._lock:
            sequence = self._known.get(key)
            if sequence is None or sequence.grammar_id != row.grammar_id:
                if start is None:
                    return None
                sequence = _Sequence(row.grammar_id, start.deep_copy(), now_s)
                self._known[key] = sequence
            sequence.used_s = now_s
            self._known.move_to_end(key)
            while len(self._known) > self._max_sequences:
                self._known.popitem(last=False)
            return sequence


def _advance(sequence: _Sequence, row: MaskRow, vocab_size: int) -> str:
    """Make the sequence end with the row's tokens; says what is wrong, if anything is.

    Tokens known beyond the row's end, or other than the row's, are taken back.
    """
    if len(row.token_ids) % 4 or row.position < 0:
        return "token ids are int32, and a position is not negative"
    told = array("i", row.token_ids).tolist()
    if told and not 0 <= min(told) <= max(told) < vocab_size:
        return "a token id that the vocabulary does not have"
    known = sequence.token_ids[row.position :]
    num_equal = 0
    for ours, theirs in zip(known, told, strict=False):
        if ours != theirs:
            break
        num_equal += 1
    num_back = len(known) - num_equal
    if num_back:
        if not sequence.matcher.rollback(num_back):
            return f"cannot go back: {sequence.matcher.get_error()}"
        del sequence.token_ids[-num_back:]
    new = told[num_equal:]
    if new and not sequence.matcher.consume_tokens(new):
        return sequence.matcher.get_error() or "the tokens do not fit the grammar"
    sequence.token_ids += new
    return ""


def _mask(
    row: MaskRow,
    position: int,
    *,
    bitmask: bytes = b"",
    is_accepting: bool = False,
    need_from: int | None = None,
    need_grammar: bool = False,
    error: str = "",
) -> Mask:
    return Mask(
        request_id=row.request_id,
        choice=row.choice,
        position=position,
        bitmask=bitmask,
        is_accepting=is_accepting,
        need_from=need_from,
        need_grammar=need_grammar,
        error=error,
    )
