"""What the sampler is told, however often it forgets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finback.services.decode.mask_book import Key, MaskBook
from finback.shared.wire.messages.generate import GrammarSpec
from finback.shared.wire.messages.sampler import Mask, MaskRow

KEY = ("r", 1)
GRAMMAR = GrammarSpec(kind="regex", text="a+", grammar_id="g")


def tokens_from(key: Key, position: int) -> bytes:
    return np.arange(position, 1000, dtype="<i4").tobytes()


class ModelSampler:
    """The sampler's side of the protocol, as its messages describe it."""

    def __init__(self) -> None:
        self.grammars: set[str] = set()
        self.known: int | None = None

    def answer(self, row: MaskRow) -> Mask:
        request_id, choice = row.request_id, row.choice
        if row.grammar is not None:
            self.grammars.add(row.grammar_id)
        if row.grammar_id not in self.grammars:
            return Mask(
                position=0, need_grammar=True, need_from=0, request_id=request_id, choice=choice
            )
        known = self.known or 0
        if row.position > known:
            return Mask(position=known, need_from=known, request_id=request_id, choice=choice)
        assert row.token_ids == tokens_from(KEY, row.position)[: len(row.token_ids)]
        self.known = row.position + len(row.token_ids) // 4
        return Mask(position=self.known, bitmask=b"\1\0\0\0", request_id=request_id, choice=choice)


def test_opens_with_grammar_when_asked() -> None:
    book, sampler = MaskBook(), ModelSampler()
    book.add(KEY, GRAMMAR)
    book.want(KEY, 0)
    (row,) = book.rows(tokens_from)
    assert row.position == 0 and row.token_ids == b"" and row.grammar is None
    assert book.apply([sampler.answer(row)]).masks == []
    (row,) = book.rows(tokens_from)
    assert row.grammar == GRAMMAR
    (mask,) = book.apply([sampler.answer(row)]).masks
    assert (mask.key, mask.position) == (KEY, 0)
    assert not book.has_work


def test_broken_grammar_is_told() -> None:
    book = MaskBook()
    book.add(KEY, GRAMMAR)
    book.want(KEY, 0)
    answers = book.apply([Mask(request_id="r", choice=1, position=0, error="no")])
    assert answers.broken == [(KEY, "no")] and not book.has_work


def test_ended_is_told_once() -> None:
    book = MaskBook()
    book.add(KEY, GRAMMAR)
    book.end(KEY)
    book.end(KEY)
    assert book.has_work  # told soon, not only when another sequence needs a mask
    assert book.take_ended() == (KEY,)
    assert book.take_ended() == ()
    assert not book.has_work


@given(st.lists(st.sampled_from(["step", "restart", "other"]), max_size=50))
def test_any_restart_costs_two_questions_at_most(events: list[str]) -> None:
    book, samplers = MaskBook(), [ModelSampler(), ModelSampler()]
    book.add(KEY, GRAMMAR)
    used = 0
    for position, event in enumerate(events):
        if event == "restart":
            samplers[used] = ModelSampler()
        elif event == "other":
            used = 1 - used
        book.want(KEY, position)
        num_asked = 0
        while book.has_work:
            num_asked += 1
            assert num_asked <= 3
            answers = book.apply([samplers[used].answer(row) for row in book.rows(tokens_from)])
            for mask in answers.masks:
                assert mask.position == position
