"""What the drafter is told: every token once, and again when it forgot."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finback.services.decode.draft_book import DraftBook, Key
from finback.shared.drafting.draft_policy import DraftPolicy
from finback.shared.wire.messages.draft import Draft

KEY = ("r", 0)


class Tokens:
    """A sequence that grows."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def __call__(self, key: Key, position: int) -> bytes:
        return np.arange(position, self.num_tokens, dtype="<i4").tobytes()


def test_sends_prompt_once_then_what_is_new() -> None:
    book, tokens = DraftBook(DraftPolicy(num_draft_tokens=4)), Tokens(10)
    book.add(KEY)
    book.want(KEY, 1)
    (row,) = book.take_rows(tokens)
    assert (row.position, len(row.token_ids), row.num_draft_tokens) == (0, 40, 9)
    assert book.take_rows(tokens) == ()
    tokens.num_tokens = 12
    book.want(KEY, 1)
    (row,) = book.take_rows(tokens)
    assert (row.position, len(row.token_ids)) == (10, 8)


def test_tells_again_what_the_drafter_lacks() -> None:
    book, tokens = DraftBook(DraftPolicy()), Tokens(10)
    book.add(KEY)
    book.want(KEY, 1)
    rows = book.take_rows(tokens)
    assert book.apply(rows, [Draft(request_id="r", choice=0, position=10, need_from=3)]) == []
    book.want(KEY, 1)
    assert book.take_rows(tokens)[0].position == 3


def test_lost_question_is_told_again() -> None:
    book, tokens = DraftBook(DraftPolicy()), Tokens(10)
    book.add(KEY)
    book.want(KEY, 1)
    book.forget_sent(book.take_rows(tokens))
    book.want(KEY, 1)
    assert book.take_rows(tokens)[0].position == 0


def test_ended_sequences_are_told_and_answers_for_them_dropped() -> None:
    book, tokens = DraftBook(DraftPolicy()), Tokens(10)
    book.add(KEY)
    book.want(KEY, 1)
    rows = book.take_rows(tokens)
    book.end(KEY)
    answer = Draft(request_id="r", choice=0, position=10, token_ids=b"\x01\0\0\0")
    assert book.apply(rows, [answer]) == []
    assert book.has_ended and book.take_ended() == (KEY,) and not book.has_ended


@given(st.lists(st.sampled_from(["grow", "ask", "lose", "restart"]), max_size=60))
def test_drafter_that_restarts_ends_up_with_all_tokens(events: list[str]) -> None:
    """A model drafter: it takes rows that join on, and asks back otherwise."""
    book, tokens = DraftBook(DraftPolicy()), Tokens(5)
    book.add(KEY)
    known = 0
    for event in [*events, "ask", "ask", "ask"]:
        book.step(KEY, 0, 0)
        if event == "grow":
            tokens.num_tokens += 2
        elif event == "restart":
            known = 0
        else:
            book.want(KEY, 1)
            rows = book.take_rows(tokens)
            if not rows:
                continue
            if event == "lose":
                book.forget_sent(rows)
                continue
            joins = rows[0].position <= known
            if joins:
                known = max(known, rows[0].position + len(rows[0].token_ids) // 4)
            draft = Draft(
                request_id="r",
                choice=0,
                position=known,
                token_ids=b"\x01\0\0\0" if joins else b"",
                need_from=None if joins else known,
            )
            book.apply(rows, [draft])
    assert known == tokens.num_tokens
