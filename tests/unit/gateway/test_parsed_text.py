"""One choice through its parser: the same parts, stops, counts and logprobs however it was cut."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finback.services.gateway.parsed_text import ParsedDelta, ParsedText
from finback.shared.codec.answer_text import AnswerText
from finback.shared.codec.load import load_tokenizer
from finback.shared.codec.output import (
    CallArguments,
    CallBegin,
    CallEnd,
    OutputEvent,
    PlainParser,
    ReasoningPart,
    TextPart,
)
from finback.shared.codec.tokenizer import Tokenizer
from finback.shared.models.source import open_source
from finback.shared.wire.messages.generate import TokenLogprob

ONE = TokenLogprob(logprob=-0.5, top_ids=(), top_logprobs=())


class BracketParser:
    """`[thought]` and `{name}` (a call without arguments) among text; nothing is held back."""

    def __init__(self) -> None:
        self.is_reasoning = False
        self._name: str | None = None
        self._calls = 0

    def push(self, text: str) -> Sequence[OutputEvent]:
        events: list[OutputEvent] = []
        for char in text:
            if char == "[":
                self.is_reasoning = True
            elif char == "]":
                self.is_reasoning = False
            elif char == "{":
                self._name = ""
            elif char == "}" and self._name is not None:
                at, self._calls = self._calls, self._calls + 1
                events += [CallBegin(at, f"c{at}", self._name), CallArguments(at, "{}")]
                events.append(CallEnd(at))
                self._name = None
            elif self._name is not None:
                self._name += char
            else:
                events.append(ReasoningPart(char) if self.is_reasoning else TextPart(char))
        return events

    def finish(self) -> Sequence[OutputEvent]:
        return ()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_source().text)


def run(
    tokenizer: Tokenizer,
    text: str,
    cuts: Sequence[int] = (),
    *,
    stops: Sequence[str] = (),
    is_plain: bool = False,
    has_logprobs: bool = True,
) -> tuple[ParsedDelta, ParsedText, int]:
    """(all deltas as one, the state, the number of tokens pushed)."""
    parsed = ParsedText(
        AnswerText(tokenizer, ()),
        PlainParser() if is_plain else BracketParser(),
        stops=stops,
        min_tokens=0,
        token_bytes=tokenizer.token_bytes,
    )
    ids = tokenizer.encode(text)
    borders = sorted({0, *(cut % (len(ids) + 1) for cut in cuts), len(ids)})
    deltas = []
    num_pushed = 0
    for begin, end in itertools.pairwise(borders):
        piece = ids[begin:end]
        deltas.append(parsed.push(piece, [ONE] * len(piece) if has_logprobs else None))
        num_pushed += len(piece)
        if deltas[-1].stop is not None:
            break
    else:
        deltas.append(parsed.finish())
    return (
        ParsedDelta(
            tuple(part for delta in deltas for part in delta.parts),
            "".join(delta.text for delta in deltas),
            tuple(entry for delta in deltas for entry in delta.logprobs),
            deltas[-1].stop,
        ),
        parsed,
        num_pushed,
    )


def joined(parts: Sequence[OutputEvent]) -> tuple[str, str, list[str]]:
    """(content, reasoning, names of calls)."""
    content = "".join(part.text for part in parts if isinstance(part, TextPart))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return content, reasoning, [part.name for part in parts if isinstance(part, CallBegin)]


def told(tokenizer: Tokenizer, delta: ParsedDelta) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id, _ in delta.logprobs)


SAID = "[let me think about it] Grüße an alle 👍🏽 {look up} and then [hm] more {go}."
PIECES = st.lists(
    st.sampled_from(["[a thought]", "{call it}", "some words ", "Grüße 👍🏽", "\n\n", "stop", "st", "op"]),
    max_size=8,
)  # fmt: skip


def test_parts_and_counts(tokenizer: Tokenizer) -> None:
    delta, parsed, num_tokens = run(tokenizer, SAID, has_logprobs=False)
    content, reasoning, calls = joined(delta.parts)
    assert content == delta.text == " Grüße an alle 👍🏽  and then  more ."
    assert reasoning == "let me think about ithm"
    assert calls == ["look up", "go"]
    assert 6 <= parsed.num_reasoning_tokens < num_tokens


@given(pieces=PIECES, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_cuts_change_nothing(tokenizer: Tokenizer, pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    whole, first, _ = run(tokenizer, text)
    cut, second, _ = run(tokenizer, text, cuts)
    assert joined(cut.parts) == joined(whole.parts)
    assert cut.logprobs == whole.logprobs
    assert first.num_reasoning_tokens == second.num_reasoning_tokens


@given(pieces=PIECES, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_stops_are_found_in_content_alone(
    tokenizer: Tokenizer, pieces: list[str], cuts: list[int]
) -> None:
    """As by looking for the stop in each stretch of content between other parts."""
    text = "".join(pieces)
    free, _, _ = run(tokenizer, text, has_logprobs=False)
    expected, is_stopped = "", False
    for part in free.parts:
        if isinstance(part, TextPart):
            begin = part.text.find("stop")
            expected += part.text if begin < 0 else part.text[:begin]
            is_stopped = begin >= 0
        if is_stopped:
            break
    for has_logprobs in (False, True):
        delta, _, _ = run(tokenizer, text, cuts, stops=["stop"], has_logprobs=has_logprobs)
        assert delta.text == expected
        assert (delta.stop is not None) == is_stopped


def test_logprobs_are_those_of_content(tokenizer: Tokenizer) -> None:
    delta, _, _ = run(tokenizer, "[think]Grüße 👍🏽{call}more")
    assert told(tokenizer, delta).decode() in ("Grüße 👍🏽more", "]Grüße 👍🏽{more")


@given(text=st.text("aé👍🏽 \n1漢", max_size=30), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_plain_text_has_all_its_logprobs(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    delta, _, _ = run(tokenizer, text, cuts, is_plain=True)
    assert delta.text == text
    assert told(tokenizer, delta) == text.encode()


def test_a_stop_counts_its_tokens(tokenizer: Tokenizer) -> None:
    delta, _, _ = run(tokenizer, "[stop]one two stop three", stops=["two"], has_logprobs=False)
    assert delta.stop is not None
    assert (delta.text, delta.stop.matched) == ("one ", "two")
    ids = tokenizer.encode("[stop]one two stop three")
    assert tokenizer.decode(ids[: delta.stop.num_tokens]).endswith("two")


def test_bytes_that_are_no_text_keep_their_logprobs(tokenizer: Tokenizer) -> None:
    parsed = ParsedText(
        AnswerText(tokenizer, ()),
        BracketParser(),
        stops=(),
        min_tokens=0,
        token_bytes=tokenizer.token_bytes,
    )
    half = tokenizer.encode("👍")[:1]
    deltas = [parsed.push(half, [ONE]), parsed.finish()]
    assert "".join(delta.text for delta in deltas) == "\ufffd"
    assert sum(len(delta.logprobs) for delta in deltas) == 1
