"""Stops of a constrained choice, however its tokens come: where its text may end, and nowhere else."""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finback.services.gateway.answer_events import ChoiceEvent
from finback.services.gateway.choice_text import Reading
from finback.services.gateway.generation import Generation, Piece
from finback.services.gateway.guarded_choice import Guard, GuardedChoice, SpelledTokens
from finback.services.gateway.parsed_text import ParsedText
from finback.shared.actor.deadline import Deadline
from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.output import PlainParser
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.models.source import open_source
from finback.shared.wire.messages.decode import FinishReply
from finback.shared.wire.messages.generate import (
    ChoiceSpec,
    EndInfo,
    GenerationSpec,
    SamplingSpec,
)

ID = 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_source("embedded").text)


def packed(ids: Sequence[int]) -> bytes:
    return b"".join(token_id.to_bytes(ID, "little") for token_id in ids)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def read(
    tokenizer: Tokenizer,
    pieces: Sequence[Sequence[int]],
    *,
    stops: Sequence[str] = (),
    own_ids: frozenset[int] = frozenset(),
    is_whole: Callable[[str], bool] = is_json,
    reason: str = "stop",
) -> tuple[str, ChoiceEvent, list[str], int]:
    """(text, last event, the texts that were asked about, tokens told)."""
    spec = GenerationSpec(
        request_id="r",
        attempt=1,
        model="m",
        token_ids=b"\0\0\0\0",
        sampling=SamplingSpec(),
        choices=(ChoiceSpec(index=0, seed=0),),
        gateway="g",
    )
    generation = Generation(spec, block_hashes=b"", deadline=Deadline(), notify=asyncio.Event())
    asked: list[str] = []

    async def verdict(ids: Sequence[int]) -> bool:
        asked.append(tokenizer.decode(ids))
        await asyncio.sleep(0)
        return is_whole(asked[-1])

    async def finish() -> FinishReply | None:
        return None

    reading = Reading(
        new_text=lambda least: ParsedText(
            AnswerText(tokenizer, ()),
            PlainParser(),
            stops=stops,
            min_tokens=least,
            token_bytes=tokenizer.token_bytes,
            is_doubtful=True,
        ),
        finish=lambda _, __, ___: asyncio.create_task(finish()),
        eos_ids=frozenset(tokenizer.eos_ids),
        has_token_ids=False,
    )
    guard = Guard(
        verdict=lambda _, __, ids: asyncio.create_task(verdict(ids)),
        token_bytes=tokenizer.token_bytes,
        encode=tokenizer.encode,
        own_ids=own_ids,
        wake=lambda: None,
    )
    text = GuardedChoice(reading, generation, generation.choices[0], 0, guard)
    events: list[ChoiceEvent | None] = []
    for at, ids in enumerate(pieces):
        is_last = at == len(pieces) - 1
        end = EndInfo(finish_reason=reason, num_completion_tokens=99) if is_last else None
        events.append(text.push(Piece(packed(ids), None, end)))
        while text.is_in_doubt and not text.is_told:
            await asyncio.sleep(0)
            events.append(text.settle())
        if text.is_told:
            break
    told = [event for event in events if event is not None]
    assert [event.finish_reason is not None for event in told] == [False] * (len(told) - 1) + [True]
    return (
        "".join(event.text for event in told),
        told[-1],
        asked,
        text.counts().num_completion_tokens,
    )


@settings(max_examples=60, deadline=None)
@given(
    text=st.text('{}[]",:1ab é', max_size=12),
    stops=st.lists(st.sampled_from(['"', "}", ",", "b", " é", "1a", "]}"]), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    whole_at=st.sets(st.integers(0, 20)),
)
def test_a_stop_counts_where_the_text_is_whole(
    text: str, stops: list[str], cuts: list[int], whole_at: set[int], tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text)
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [ids[a:b] for a, b in itertools.pairwise(borders)] or [[]]
    expected, matched = text, None
    candidates = [
        (at + len(stop), at, stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at in whole_at
    ]
    if candidates:
        _, at, matched = min(candidates)
        expected = text[:at]
    shown, last, _, _ = asyncio.run(
        read(tokenizer, pieces, stops=stops, is_whole=lambda said: len(said) in whole_at)
    )
    assert (shown, last.stop_reason) == (expected, matched)
    assert last.finish_reason == "stop"


def test_json_is_never_cut(tokenizer: Tokenizer) -> None:
    said = '{"a": "x, y", "b": [1, 2]}'
    ids = tokenizer.encode(said)
    for stops in ([","], ["}"], ['"'], ["x"], [" "], ["]", "1, 2"]):
        shown, last, asked, _ = asyncio.run(read(tokenizer, [ids], stops=stops))
        assert (shown, last.stop_reason) == (said, None)
        assert asked and not any(map(is_json, asked))


def test_a_cut_is_told(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('{"a": "x, y"')
    shown, last, _, _ = asyncio.run(read(tokenizer, [ids], stops=[","], reason="length"))
    assert (shown, last.finish_reason) == ('{"a": "x, y"', "length")


def test_stops_inside_of_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one another")
    assert len(ids) == 2
    found = asyncio.run(read(tokenizer, [ids], stops=["other"], is_whole=lambda _: True))
    assert (found[0], found[1].stop_reason, found[2]) == ("one an", "other", ["one an"])
    assert found[3] == 2


def test_the_callers_stop_tokens(tokenizer: Tokenizer) -> None:
    said = '{"a": 1}\n'
    ids = tokenizer.encode(said)
    brace, newline = ids[-2], ids[-1]
    assert tokenizer.token_bytes(newline) == b"\n" and tokenizer.token_bytes(brace) == b"}"
    for own, text, matched in (({brace}, said, None), ({brace, newline}, said[:-1], newline)):
        found = asyncio.run(read(tokenizer, [ids], own_ids=frozenset(own)))
        assert (found[0], found[1].stop_reason) == (text, matched)
    assert found[3] == len(ids)


def test_no_verdict_is_an_error(tokenizer: Tokenizer) -> None:
    def none(_: str) -> bool:
        raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        asyncio.run(read(tokenizer, [tokenizer.encode("a b")], stops=["b"], is_whole=none))


@given(st.lists(st.text("aé👍 ", min_size=1, max_size=4), max_size=5), st.data())
def test_spelled_tokens_are_cut_at_characters(words: list[str], data: st.DataObject) -> None:
    tokens = list("".join(words).encode())
    spelled = SpelledTokens(lambda token_id: bytes([token_id]))
    spelled.add(tokens)
    text = "".join(words)
    at = len(text[: data.draw(st.integers(0, len(text)))].encode())
    assert spelled.cut(at, lambda rest: list(rest.encode())) == tokens[:at]


def test_choices_without_doubts_are_as_ever(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("nothing to stop at")
    shown, last, asked, num = asyncio.run(read(tokenizer, [ids[:2], ids[2:]], stops=["zebra"]))
    assert (shown, last.finish_reason, asked, num) == ("nothing to stop at", "stop", [], 99)
