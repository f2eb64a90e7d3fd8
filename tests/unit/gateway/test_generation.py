"""Rows in any order, doubled, cut and lost: what is taken is the completion, once."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from finback.services.gateway.generation import Generation
from finback.shared.actor.deadline import Deadline
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    SamplingSpec,
    TokenLogprob,
    TokenRow,
)


def make(num_choices: int = 1, credit: int = 8) -> Generation:
    spec = GenerationSpec(
        request_id="r",
        attempt=1,
        model="m",
        token_ids=b"\0\0\0\0",
        sampling=SamplingSpec(),
        choices=tuple(ChoiceSpec(index=index, seed=index) for index in range(num_choices)),
        gateway="g",
        credit_tokens=credit,
    )
    made = Generation(spec, block_hashes=b"", deadline=Deadline(), notify=asyncio.Event())
    made.begin(1)
    return made


def row(tokens: list[int], start: int, stop: int, *, is_end: bool = False) -> TokenRow:
    part = tokens[start:stop]
    return TokenRow(
        request_id="r",
        choice=0,
        attempt=1,
        offset=start,
        token_ids=b"".join(token.to_bytes(4, "little") for token in part),
        logprobs=tuple(TokenLogprob(logprob=-float(token)) for token in part),
        end=EndInfo(finish_reason="stop") if is_end else None,
    )


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=20),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=15),
    st.data(),
)
def test_rows_in_any_order(
    tokens: list[int], spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    generation = make()
    choice = generation.choices[0]
    taken = b""
    logprobs: list[TokenLogprob] = []
    num_known = 0
    for first, second in [*spans, (0, len(tokens))]:
        start, stop = sorted((min(first, len(tokens)), min(second, len(tokens))))
        lacking = generation.accept(row(tokens, start, stop, is_end=stop == len(tokens)))
        is_gap = start > num_known and choice.end is None
        assert (lacking is not None) == is_gap
        if not is_gap:
            num_known = max(num_known, stop)
        assert choice.num_received == num_known
        if data.draw(st.booleans()):
            piece = generation.take(choice)
            if piece is not None:
                taken += piece.token_ids
                logprobs += piece.logprobs or ()
    piece = generation.take(choice)
    if piece is not None:
        taken += piece.token_ids
        logprobs += piece.logprobs or ()
    assert memoryview(taken).cast("i").tolist() == tokens
    assert [-entry.logprob for entry in logprobs] == tokens
    assert generation.is_complete


def test_credit_is_granted_when_half_is_used() -> None:
    generation = make(credit=8)
    choice = generation.choices[0]
    tokens = list(range(20))
    generation.accept(row(tokens, 0, 3))
    generation.take(choice)
    assert not generation.needs_grant(choice)
    generation.accept(row(tokens, 3, 4))
    generation.take(choice)
    assert generation.needs_grant(choice)
    assert generation.extend_credit(choice) == 12
    assert not generation.needs_grant(choice)


def test_an_ended_choice_takes_no_more() -> None:
    generation = make()
    choice = generation.choices[0]
    generation.accept(row([1, 2, 3], 0, 2))
    assert generation.finish(choice, EndInfo(finish_reason="stop"))
    assert not generation.finish(choice, EndInfo(finish_reason="stop"))
    assert generation.accept(row([1, 2, 3], 2, 3, is_end=True)) is None
    assert generation.take(choice) is None
    assert generation.is_complete


def test_an_error_end_loses_the_attempt() -> None:
    generation = make()
    end = EndInfo(finish_reason="error", error_code="unavailable", error_message="gone")
    generation.accept(TokenRow(request_id="r", choice=0, attempt=1, offset=0, end=end))
    assert not generation.is_complete
    generation.begin(2)
    assert not generation.has_tokens


def test_unknown_choices_are_ignored() -> None:
    generation = make()
    assert generation.accept(TokenRow(request_id="r", choice=7, attempt=1, offset=0)) is None
