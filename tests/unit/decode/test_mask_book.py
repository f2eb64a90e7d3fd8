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
    (row,) = book.take_rows(tokens_from)
    assert row.position == 0 and row.token_ids == b"" and row.grammar is None
    assert book.take_rows(tokens_from) == ()  # it is asked for already
    assert book.apply([row], [sampler.answer(row)]).masks == []
    (row,) = book.take_rows(tokens_from)
    assert row.grammar == GRAMMAR
    (mask,) = book.apply([row], [sampler.answer(row)]).masks
    assert (mask.key, mask.position) == (KEY, 0)
    assert not book.has_work


def test_broken_grammar_is_told() -> None:
    book = MaskBook()
    book.add(KEY, GRAMMAR)
    book.want(KEY, 0)
    rows = book.take_rows(tokens_from)
    answers = book.apply(rows, [Mask(request_id="r", choice=1, position=0, error="no")])
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
            rows = book.take_rows(tokens_from)
            answers = book.apply(rows, [samplers[used].answer(row) for row in rows])
            for mask in answers.masks:
                assert mask.position == position


def test_who_asks_back_for_ever_is_asked_less_and_holds_up_nobody() -> None:
    book = MaskBook()
    for choice in (1, 2):
        book.add(("r", choice), GRAMMAR)
        book.want(("r", choice), 0)
    for _ in range(3):
        rows = book.take_rows(tokens_from)
        assert len(rows) == 2
        book.apply(rows, [Mask(request_id="r", choice=1, position=0, need_from=0)], 5.0)
        book.forget_asked(rows)
    assert [row.choice for row in book.take_rows(tokens_from, 5.05)] == [2]
    assert book.retry_s() == 5.1
    assert [row.choice for row in book.take_rows(tokens_from, 5.1)] == [1]


def test_an_answer_to_what_began_anew_counts_for_nothing() -> None:
    book = MaskBook()
    book.add(KEY, GRAMMAR)
    book.want(KEY, 0)
    rows = book.take_rows(tokens_from)
    book.add(KEY, GRAMMAR)
    book.want(KEY, 0)
    assert not book.apply(rows, [Mask(request_id="r", choice=1, position=0, bitmask=b"1")]).masks
    assert len(book.take_rows(tokens_from)) == 1


def test_a_guess_goes_along_as_far_as_it_was_right() -> None:
    book, sampler = MaskBook(), ModelSampler()
    sampler.grammars.add("g")
    book.add(KEY, GRAMMAR)
    book.want(KEY, 3)
    rows = book.take_rows(tokens_from)
    assert rows[0].guess_ids == b""
    book.apply(rows, [sampler.answer(rows[0])])
    book.guess(KEY, 2, np.array([2, 3, 9], "<i4").tobytes())
    rows = book.take_rows(tokens_from)  # although no mask is wanted
    assert (rows[0].position, rows[0].token_ids) == (3, b"")
    assert rows[0].guess_ids == np.array([3, 9], "<i4").tobytes()
    answer = Mask(request_id="r", choice=1, position=3, bitmask=b"m", ahead_ids=b"id")
    assert [mask.ahead_ids for mask in book.apply(rows, [answer]).masks] == [b"id"]
    assert book.take_rows(tokens_from) == ()
    book.want(KEY, 4)
    rows = book.take_rows(tokens_from)
    assert rows[0].guess_ids == np.array([9], "<i4").tobytes()
    book.apply(rows, [sampler.answer(rows[0])])
    book.want(KEY, 5)  # index 4 brought 4, not 9
    assert book.take_rows(tokens_from)[0].guess_ids == b""
